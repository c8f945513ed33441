#!/usr/bin/env python
import atexit
import gc
import os
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line
from django.db import OperationalError

if __name__ == "__main__":
    atexit.register(gc.freeze)  # else the interpreter's last act is to look through all of Django, several times
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    try:
        execute_from_command_line(sys.argv)
    except KeyboardInterrupt:
        # What a command has committed stays, and run again it goes on from there.
        sys.stderr.write("Stopped.\n")
        sys.exit(130)
    except ImproperlyConfigured as error:
        sys.exit(f"error: {error}")
    except OperationalError as error:
        # A server that answers gives a code with what it refuses; without one it was never reached, or went away.
        if getattr(error.__cause__, "sqlstate", None) or "--traceback" in sys.argv:
            raise
        sys.exit(f"error: DATABASE_URL: the database cannot be used: {' '.join(str(error).split())}")
