import random
import signal
import time
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import StringIO
from threading import Event, Thread
from typing import Any
from uuid import UUID

import httpx
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import connection
from knox.models import AuthToken

from devices.client import Agent, Refused, Server
from devices.demo import DEVICES, PCS, agent_name

PEOPLE = "demo-people"
PLAYERS = [PEOPLE, *map(agent_name, PCS)]
GROUPS = ("operator", "message-sender", "message-client", "campaign-manager", "reminder-client")
SECONDS = 3.0
FRESH = timedelta(minutes=15)  # people read what has just come; what they left lying stays as it is
# Of a hundred people, how many ever do it; and how many of those in one round, so that a row's life can be watched.
RECEIVE, CONVERT, REPLY = (94, 0.4), (38, 0.15), (30, 0.03)
REPLIES_SEEN = (
    ("human", "좋은 제안 감사합니다. 다음 주에 통화 가능할까요?"),
    ("human", "Thanks, this looks useful. Can you send the price list?"),
    ("ooo", "휴가 중입니다. 3일 뒤에 복귀합니다."),
    ("ooo", "I am out of office this week and will answer when I am back."),
    ("unsubscribe", "Please take me off this list."),
)


class Command(BaseCommand):
    help = "Play the world outside the demo: people who receive, click and answer, and two PCs that work."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--url", default=f"http://localhost:{settings.PORT}")
        parser.add_argument("--application", default="demo", metavar="SLUG")

    def handle(self, *args: Any, **options: Any) -> None:
        groups = [f"--group={group}" for group in GROUPS]
        tokens = {PEOPLE: self.token(PEOPLE, *groups, f"--application={options['application']}")}
        for pc in PCS:
            tokens[pc] = self.token(agent_name(pc), "--group=device-agent", f"--pc={pc}")
        connection.close()
        stopping = Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_caught: stopping.set())
        agents = [self.agent(options["url"], pc, tokens[pc]) for pc in PCS]
        with httpx.Client(
            base_url=f"{options['url']}/api/v1", headers={"Authorization": f"Token {tokens[PEOPLE]}"}, timeout=10
        ) as client:
            World(client, options["application"], self.stderr.write).turn(stopping)
        for agent, thread in agents:
            agent.stop()
            thread.join(timeout=5)

    def token(self, name: str, *arguments: str) -> str:
        """A new token each start; those of earlier ones end."""
        AuthToken.objects.filter(user__in=get_user_model().objects.filter(username=name)).delete()
        out = StringIO()
        call_command("create_client", name, *arguments, stdout=out, stderr=StringIO())
        return out.getvalue().strip()

    def agent(self, url: str, pc: str, token: str) -> tuple[Agent, Thread]:
        agent = Agent(Server(url, token), pc, DEVICES, failure_rate=0.08, job_seconds=8)

        def work() -> None:
            try:
                agent.run()
            except Refused as refusal:
                self.stderr.write(str(refusal))

        thread = Thread(target=work, name=pc, daemon=True)
        thread.start()
        return agent, thread


class World:
    """Speaks REST only, like the programs and people it stands for."""

    def __init__(self, client: httpx.Client, application: str, say: Callable[[str], object]) -> None:
        self.client, self.application, self.say = client, application, say

    def turn(self, stopping: Event) -> None:
        while not stopping.wait(SECONDS):
            for scene in (self.receive, self.convert, self.reply, self.queue_a_task):
                try:
                    scene()
                except httpx.HTTPError as error:
                    self.say(f"{scene.__name__}: {type(error).__name__}: {error}")
                if stopping.is_set():
                    return

    def rows(self, path: str, **filters: Any) -> list[dict[str, Any]]:
        answer = self.client.get(path, params={"page_size": 200, **filters})
        answer.raise_for_status()
        return list(answer.json()["results"])

    def chosen(self, path: str, habit: tuple[int, float], **filters: Any) -> list[dict[str, Any]]:
        """Who never does it is told by the row's id, or all would have done it in the end."""
        among, share = habit
        return [
            row for row in self.rows(path, **filters) if UUID(row["id"]).int % 100 < among and random.random() < share
        ]

    def fresh(self, status: str) -> dict[str, str]:
        return {"status": status, "created_after": (datetime.now(UTC) - FRESH).isoformat()}

    def receive(self) -> None:
        for message in self.chosen("/messages/", RECEIVE, **self.fresh("successful")):
            self.client.post(f"/messages/{message['id']}/receive/")

    def convert(self) -> None:
        for message in self.chosen("/messages/", CONVERT, **self.fresh("received")):
            self.client.post(f"/messages/{message['id']}/convert/", json={"action": "click"})

    def reply(self) -> None:
        for enrollment in self.chosen("/enrollments/", REPLY, status="active"):
            kind, text = random.choice(REPLIES_SEEN)
            self.client.post("/replies/", json={"enrollment_id": enrollment["id"], "kind": kind, "text": text})

    def queue_a_task(self) -> None:
        if not self.rows("/tasks/", status="running") and not self.rows("/tasks/", status="pending"):
            name = f"check-in {time.strftime('%H:%M')}"
            self.client.post("/tasks/", json={"name": name, "payload": {"open": "app"}, "device_count": 16})
