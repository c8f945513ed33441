"""Entry point of a child of `up`: python -m config.supervisor.child PARENT web|cluster|demo ARGUMENT…

However its parent dies, a process started here dies too, and so do all it forks: `kill -9` of `up` or of any process
in between leaves nobody behind. The kernel sees to it; a signal handler could not.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_forker = 0


def die_with(parent: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)


def _remember_forker() -> None:
    global _forker
    _forker = os.getpid()


def bind_family(parent: int) -> None:
    die_with(parent)
    # The request is not inherited by forks, so each makes its own.
    os.register_at_fork(before=_remember_forker, after_in_child=lambda: die_with(_forker))


def serve_web(arguments: list[str]) -> None:
    from gunicorn.app.wsgiapp import run

    sys.argv = ["gunicorn", *arguments]
    run()


def serve_cluster(lane: str) -> None:
    import django

    django.setup()
    from django.core.management import call_command

    from config.supervisor import broker

    broker.lane = lane
    call_command("qcluster")


def play_demo(url: str) -> None:
    import django

    django.setup()
    from django.core.management import call_command

    call_command("live_demo", url=url)


def main() -> None:
    parent, kind, *arguments = sys.argv[1:]
    bind_family(int(parent))
    # The interpreter's last collections go through all of Django: on a busy machine seconds of the ten a stop may take.
    atexit.register(gc.freeze)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    if kind == "web":
        serve_web(arguments)
    elif kind == "demo":
        play_demo(*arguments)
    else:
        serve_cluster(*arguments)


if __name__ == "__main__":
    main()
