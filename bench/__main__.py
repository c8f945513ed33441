"""`make bench`: every benchmark of this folder, each on a database of its own that is dropped afterwards."""

import importlib
import logging
import os
import pkgutil
import sys

import django


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    django.setup()
    # A line per request would bury the tables.
    logging.disable(logging.INFO)
    from django.db import connection

    import bench

    wanted = sys.argv[1:]
    real = connection.settings_dict["NAME"]
    for module in sorted(pkgutil.iter_modules(bench.__path__), key=lambda found: found.name):
        if module.name == "__main__" or (wanted and module.name not in wanted):
            continue
        connection.creation.create_test_db(verbosity=0, autoclobber=True)
        try:
            importlib.import_module(f"bench.{module.name}").run()
        finally:
            connection.creation.destroy_test_db(real, verbosity=0)


if __name__ == "__main__":
    main()
