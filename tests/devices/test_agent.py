"""The reference agent over real HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.utils import timezone
from knox.models import AuthToken

from devices import services
from devices.client import Agent, Away, Refused, Server
from devices.models import PC, Attempt, Device, Task, TaskDevice


@pytest.fixture
def token(transactional_db):
    user = User.objects.create(username="agent")
    user.groups.add(Group.objects.get(name="device-agent"))
    services.assign_agent(user, "PC-01")
    return AuthToken.objects.create(user)[1]


@pytest.fixture
def page_server():
    class Page(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(self.server.status)
            self.send_header("Retry-After", "Wed, 18 Nov 2026 20:00:00 GMT")
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"<p/>")

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def agent_for(live_server, token, **options):
    return Agent(Server(live_server.url, token), "PC-01", options.pop("devices", 3), exit_when_idle=0, **options)


def test_works_through_the_queue_and_leaves_when_idle(live_server, token):
    for n in range(3):
        services.create_task(f"job {n}", 3, timezone.now())
    counts = agent_for(live_server, token, failure_rate=0).run()
    assert counts == {"claimed": 9, "complete": 9}
    assert set(Task.objects.values_list("status", "devices_done")) == {("success", 3)}
    assert set(Device.objects.values_list("status", flat=True)) == {"online"}


def test_failures_are_reported_and_tried_again(live_server, token):
    services.create_task("job", 2, timezone.now())
    counts = agent_for(live_server, token, devices=2, failure_rate=1).run()
    assert counts == {"claimed": 6, "fail": 6}
    assert Task.objects.get().status == "failed"
    assert set(Device.objects.values_list("status", flat=True)) == {"error"}
    assert Attempt.objects.filter(outcome="error").count() == 6


def test_a_result_that_comes_too_late_is_dropped(live_server, token):
    services.create_task("job", 1, timezone.now())
    agent = agent_for(live_server, token, failure_rate=0, job_seconds=60)
    agent.beat()
    assert agent.claim() == 1
    [job] = agent.jobs.values()
    row = TaskDevice.objects.get()
    services.fail_task_device(row.pk, PC.objects.get().agent, job.token, "by another hand", timezone.now())
    agent.finish(job)
    assert (agent.counts["too_late"], agent.jobs) == (1, {})
    assert TaskDevice.objects.get().status == "pending"


def test_a_run_of_a_cancelled_task_is_given_up_at_the_next_renewal(live_server, token):
    services.create_task("job", 1, timezone.now())
    agent = agent_for(live_server, token, job_seconds=60)
    agent.beat()
    agent.claim()
    services.cancel_task(Task.objects.get(), timezone.now())
    [job] = agent.jobs.values()
    agent.renew(job)
    assert agent.jobs == {}
    assert TaskDevice.objects.get().status == "cancelled"


def test_the_wrong_token_or_pc_is_refused_for_good(live_server, token):
    with pytest.raises(Refused, match="401"):
        agent_for(live_server, "wrong").run()
    services.create_pc("PC-02", 20)
    with pytest.raises(Refused, match="404"):
        Agent(Server(live_server.url, token), "PC-02", 1).run()


@pytest.mark.parametrize("path", ["/elsewhere", "/healthz"])
def test_a_url_that_answers_with_pages_for_people_is_refused_in_one_line(live_server, token, path):
    with pytest.raises(Refused, match="404 .*URL"):
        Agent(Server(live_server.url + path, token), "PC-01", 1).run()


def test_a_proxys_page_and_its_date_are_no_answer(page_server):
    for status, text in ((200, "not JSON"), (503, "status 503")):
        page_server.status = status
        with pytest.raises(Away, match=text) as caught:
            Server(f"http://127.0.0.1:{page_server.server_port}", "token").post("/pcs/PC-01/claim/", {})
        assert caught.value.wait == 0.5


def test_a_server_that_is_not_there_is_away():
    with pytest.raises(Away):
        Server("http://127.0.0.1:9", "token", timeout=1).post("/pcs/", {})


@pytest.mark.parametrize(
    "bad",
    [
        ["--devices", "0"],
        ["--failure-rate", "2"],
        ["--job-seconds", "-1"],
        ["--devices", "many"],
        ["--url", "nonsense"],
    ],
)
def test_the_command_refuses_nonsense(bad):
    with pytest.raises(CommandError, match=bad[0]):
        call_command("device_agent", "--pc", "PC-01", "--url", "http://localhost:1", "--token", "x", *bad)
