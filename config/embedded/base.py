"""Django's PostgreSQL backend on the embedded server. DATABASES needs ENGINE "config.embedded", NAME and DATA_DIR."""

import time
from collections.abc import Iterable
from typing import Any

import psycopg
from django.db.backends.postgresql import base, client
from psycopg import sql

from config import embedded
from config.embedded.keeper import RECOVERY


class DatabaseClient(client.DatabaseClient):
    def runshell(self, parameters: Iterable[str]) -> None:
        self.connection.ensure_connection()
        type(self).executable_name = str(embedded.install_dir() / "bin" / "psql")
        super().runshell(list(parameters))


class DatabaseWrapper(base.DatabaseWrapper):
    client_class = DatabaseClient

    def get_connection_params(self) -> dict[str, Any]:
        self.settings_dict["HOST"] = embedded.serve(self.settings_dict["DATA_DIR"])
        self.settings_dict["USER"] = self.settings_dict["USER"] or "signalbox"
        return super().get_connection_params()

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """Connect, starting the server anew if it died since: a killed postmaster is noticed only here."""
        give_up = time.monotonic() + RECOVERY
        while True:
            try:
                return super().get_new_connection(conn_params)
            except psycopg.OperationalError as error:
                if f'database "{conn_params["dbname"]}" does not exist' in str(error):
                    self._create_database(conn_params)
                elif not self._away(conn_params["host"], error) or time.monotonic() > give_up:
                    raise
            time.sleep(0.05)
            conn_params = {**conn_params, "host": embedded.serve(self.settings_dict["DATA_DIR"])}

    def _away(self, host: str, error: Exception) -> bool:
        # "... starting up", "... shutting down", "... in recovery mode": it will be back.
        return "the database system is " in str(error) or not embedded.listening(host)

    def _create_database(self, conn_params: dict[str, Any]) -> None:
        name = sql.Identifier(conn_params["dbname"])
        place = {key: conn_params[key] for key in ("host", "user")}
        with psycopg.connect(**place, dbname="postgres", autocommit=True) as connection:
            try:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(name))
            except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                pass  # another process made it at the same moment
