"""The REST surface: who may, what is refused, what comes back."""

import pytest
from django.utils import timezone
from drf_spectacular.generators import SchemaGenerator

from campaigns.models import Enrollment, Execution, Lead, Sender, Sequence, Step
from campaigns.services import sequences
from config.errors import Missing
from messaging.models import Message, Subscription, Suppression
from messaging.services import join_application
from tests.campaigns.factories import DAY, HOUR, SenderFactory, SequenceFactory, StepFactory, pool, work

pytestmark = pytest.mark.django_db
API = "/api/v1"
UNKNOWN = "019a0000-0000-7000-8000-000000000000"


@pytest.fixture
def manager(make_client):
    client = make_client("campaign-manager")
    join_application(client.user, "shop")
    return client


@pytest.fixture
def operator(make_client):
    return make_client("operator", username="operator")


@pytest.fixture
def viewer(make_client):
    return make_client("viewer", username="viewer")


def codes(response):
    return [(error["code"], error["attr"]) for error in response.json()["errors"]]


def step(**fields):
    return {"channel": "email", "subject": "Hi", "body": "Dear {{name}}", "delay_seconds": 0, **fields}


@pytest.fixture
def made(manager):
    """A sequence with a sender, two steps and a lead, over REST."""
    sender = manager.post(f"{API}/senders/", {"channel": "email", "address": "me@shop.example"}).json()
    lead = manager.post(f"{API}/leads/", {"name": "Kim", "email": "kim@example.com"}).json()
    body = {"name": "Spring", "sender_ids": [sender["id"]], "steps": [step(), step(delay_seconds=3600)]}
    response = manager.post(f"{API}/sequences/", body)
    assert response.status_code == 201, response.json()
    return {"sender": sender, "lead": lead, "sequence": response.json()}


def url(made, verb=""):
    return f"{API}/sequences/{made['sequence']['id']}/{verb}"


class TestSequences:
    def test_the_row_has_all_its_fields(self, manager, made):
        row = manager.get(url(made)).json()
        assert row == made["sequence"]
        assert row["status"] == row["display_state"] == "draft"
        assert row["counters"] == {"total": 0, "sent": 0, "failed": 0, "skipped": 0, "waiting": 0, "enrollments": 0}
        assert [s["position"] for s in row["steps"]] == [1, 2]
        assert (row["harvest_days"], row["stale_after_multiplier"], row["kind"]) == (3, 3, "notice")
        assert (row["has_pending_work"], row["display_until"], row["activated_at"]) == (False, None, None)
        assert row["sender_ids"] == [made["sender"]["id"]]

    @pytest.mark.parametrize(
        ("body", "attr"),
        [
            ({}, "name"),
            ({"name": ""}, "name"),
            ({"name": "x", "harvest_days": 0}, "harvest_days"),
            ({"name": "x", "harvest_days": 91}, "harvest_days"),
            ({"name": "x", "stale_after_multiplier": 0}, "stale_after_multiplier"),
            ({"name": "x", "stale_after_multiplier": 101}, "stale_after_multiplier"),
            ({"name": "x", "kind": "spam"}, "kind"),
            ({"name": "x", "status": "active"}, "status"),
            ({"name": "x", "has_pending_work": True}, "has_pending_work"),
            ({"name": "x", "surplus": 1}, "surplus"),
            ({"name": "x", "sender_ids": ["nonsense"]}, "sender_ids.0"),
            ({"name": "x", "sender_ids": [UNKNOWN]}, "sender_ids"),
            ({"name": "x", "application": "foreign"}, "application"),
            ({"name": "x", "steps": [step(channel="fax")]}, "steps.0.channel"),
            ({"name": "x", "steps": [step(delay_seconds=-1)]}, "steps.0.delay_seconds"),
            ({"name": "x", "steps": [step(), step(body="{{ a b }}")]}, "steps.1.body"),
            ({"name": "a\x00b"}, "name"),
            ({"name": 5}, "name"),
            ({"name": "x", "harvest_days": "3"}, "harvest_days"),
            ({"name": "x", "sender_ids": [1]}, "sender_ids.0"),
            ({"name": "x", "steps": [step(body=1)]}, "steps.0.body"),
            ({"name": "x", "steps": [step(delay_seconds="1")]}, "steps.0.delay_seconds"),
        ],
    )
    def test_bad_bodies_are_400_and_write_nothing(self, manager, body, attr):
        response = manager.post(f"{API}/sequences/", body)
        assert response.status_code == 400
        assert attr in [error["attr"] for error in response.json()["errors"]], response.json()
        assert not Sequence.objects.exists()

    def test_without_exactly_one_application_it_must_be_named(self, make_client):
        client = make_client("campaign-manager")
        assert codes(client.post(f"{API}/sequences/", {"name": "x"})) == [("required", "application")]
        join_application(client.user, "one")
        assert client.post(f"{API}/sequences/", {"name": "x"}).status_code == 201
        join_application(client.user, "two")
        assert client.post(f"{API}/sequences/", {"name": "x"}).status_code == 400
        assert client.post(f"{API}/sequences/", {"name": "x", "application": "two"}).json()["application"] == "two"

    def test_lifecycle(self, manager, operator, made):
        def go(verb, client=manager):
            response = client.post(url(made, f"{verb}/"))
            return response.status_code, response.json().get("status")

        assert go("generate") == (200, "generating")
        assert go("mark-ready") == (200, "ready")
        assert go("resume")[0] == 409
        assert go("activate") == (200, "active")
        assert go("activate")[0] == 409
        assert go("archive")[0] == 409
        assert go("pause") == (200, "paused")
        assert go("resume") == (200, "active")
        assert go("complete")[0] == 403
        assert go("complete", operator) == (200, "completed")
        assert go("reactivate")[0] == 403
        assert go("reactivate", operator) == (200, "active")
        assert go("complete", operator) == (200, "completed")
        assert go("archive") == (200, "archived")
        assert go("activate")[0] == 409

    def test_generating_goes_back_to_draft_or_to_the_archive(self, manager, made):
        manager.post(url(made, "generate/"))
        assert manager.post(url(made, "cancel-generating/")).json()["status"] == "draft"
        manager.post(url(made, "generate/"))
        assert manager.post(url(made, "archive/")).json()["status"] == "archived"

    def test_activating_needs_steps_and_senders(self, manager, made):
        empty = manager.post(f"{API}/sequences/", {"name": "x"}).json()["id"]
        assert codes(manager.post(f"{API}/sequences/{empty}/activate/")) == [("no_steps", None)]
        manager.post(f"{API}/sequences/{empty}/steps/", step())
        assert codes(manager.post(f"{API}/sequences/{empty}/activate/")) == [("no_sender", None)]
        manager.patch(f"{API}/sequences/{empty}/", {"sender_ids": [made["sender"]["id"]]})
        assert manager.post(f"{API}/sequences/{empty}/activate/").status_code == 200

    def test_the_time_in_draft_is_not_lateness(self, manager, made):
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        Execution.objects.update(scheduled_at=timezone.now() - 50 * DAY)
        manager.post(url(made, "activate/"))
        assert timezone.now() - Execution.objects.get().scheduled_at < HOUR

    def test_complete_and_archive_skip_everything_that_waits(self, manager, operator, made):
        phone = manager.post(f"{API}/leads/", {"phone": "+821012345678"}).json()
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"], phone["id"]]})
        manager.post(url(made, "activate/"))
        row = operator.post(url(made, "complete/")).json()
        assert (row["counters"]["skipped"], row["has_pending_work"]) == (2, False)
        assert set(Execution.objects.values_list("skip_reason", flat=True)) == {"force_completed"}
        assert set(Enrollment.objects.values_list("status", flat=True)) == {"stopped"}

    def test_archiving_skips_as_archived(self, manager, made):
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        manager.post(url(made, "archive/"))
        assert Execution.objects.get().skip_reason == "archived"
        assert manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]}).status_code == 409

    def test_filters_and_unknown_values(self, manager, made):
        assert len(manager.get(f"{API}/sequences/?status=draft").json()["results"]) == 1
        assert manager.get(f"{API}/sequences/?status=active").json()["results"] == []
        assert len(manager.get(f"{API}/sequences/?display_state=draft").json()["results"]) == 1
        bad = ("status=nope", "display_state=nope", "nope=1", "sender_id=x", "status=a%00b", "has_pending_work=maybe")
        for query in bad:
            assert manager.get(f"{API}/sequences/?{query}").status_code == 400, query
        counts = {text: len(manager.get(f"{API}/sequences/?has_pending_work={text}").json()["results"])
                  for text in ("true", "false", "False")}  # fmt: skip
        assert counts == {"true": 0, "false": 1, "False": 1}

    def test_lists_are_narrowed_to_a_sequence_or_sender(self, manager, made):
        assert manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]}).status_code == 200
        enrollment = manager.get(f"{API}/enrollments/").json()["results"][0]
        manager.post(f"{API}/replies/", {"enrollment_id": enrollment["id"], "text": "hi"})
        sequence, sender = made["sequence"]["id"], made["sender"]["id"]
        narrowed = [f"leads/?sequence_id={sequence}", f"senders/?sequence_id={sequence}",
                    f"replies/?sender_id={sender}", f"sequences/?sender_id={sender}"]  # fmt: skip
        for path in narrowed:
            assert len(manager.get(f"{API}/{path}").json()["results"]) == 1, path
            nobody = path.replace(sequence, sender) if sequence in path else path.replace(sender, sequence)
            assert manager.get(f"{API}/{nobody}").json()["results"] == []
            assert manager.get(f"{API}/{path}x").status_code == 400

    def test_resuming_skips_what_is_stale(self, manager, made):
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        manager.post(url(made, "activate/"))
        manager.post(url(made, "pause/"))
        Execution.objects.update(scheduled_at=timezone.now() - 10 * DAY)
        row = manager.post(url(made, "resume/")).json()
        assert Execution.objects.get().skip_reason == "stale"
        assert row["status"] == "completed"

    def test_clone_is_a_draft_with_steps_and_pool(self, manager, made):
        manager.post(url(made, "activate/"))
        response = manager.post(url(made, "clone/"))
        row = response.json()
        assert (response.status_code, row["status"]) == (201, "draft")
        assert [s["subject"] for s in row["steps"]] == ["Hi", "Hi"]
        assert row["sender_ids"] == [made["sender"]["id"]]
        assert row["id"] != made["sequence"]["id"]

    def test_stats_and_reconcile(self, manager, made):
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        manager.post(url(made, "activate/"))
        stats = manager.get(url(made, "stats/")).json()
        assert stats["counters"]["waiting"] == 1
        assert [s["waiting"] for s in stats["steps"]] == [1, 0]
        assert set(stats["steps"][0]) == {"step_id", "position", "total", "sent", "failed", "skipped", "waiting"}
        said = manager.post(url(made, "reconcile/")).json()
        assert (said["verdict"], said["guard"], said["changes"]) == ("hold", "pending_work", {})
        assert said["sequence"]["id"] == made["sequence"]["id"]

    def test_test_send_makes_a_message_outside_of_the_counters(self, manager, made):
        response = manager.post(url(made, "test-send/"), {"lead_id": made["lead"]["id"]})
        assert response.status_code == 201
        assert str(Message.objects.get().pk) == response.json()["message_id"]
        assert manager.post(url(made, "test-send/"), {"lead_id": UNKNOWN}).status_code == 400

    def test_delete(self, manager, made):
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        assert codes(manager.delete(url(made))) == [("has_enrollments", None)]
        empty = manager.post(f"{API}/sequences/", {"name": "x"}).json()["id"]
        assert manager.delete(f"{API}/sequences/{empty}/").status_code == 204


class TestSteps:
    def test_insert_move_remove(self, manager, made):
        steps = url(made, "steps/")
        middle = manager.post(steps, step(subject="middle", position=2)).json()
        assert [s["subject"] for s in manager.get(steps).json()["results"]] == ["Hi", "middle", "Hi"]
        moved = manager.patch(f"{steps}{middle['id']}/", {"position": 1}).json()
        assert moved["position"] == 1
        assert manager.delete(f"{steps}{middle['id']}/").status_code == 204
        assert [s["position"] for s in manager.get(steps).json()["results"]] == [1, 2]

    def test_a_step_with_waiting_executions_stays_in_an_active_sequence(self, manager, made):
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        manager.post(url(made, "activate/"))
        first = made["sequence"]["steps"][0]["id"]
        response = manager.delete(url(made, f"steps/{first}/"))
        assert response.status_code == 409
        assert codes(response) == [("step_has_waiting_executions", None)]
        assert response.json()["waiting"] == 1
        assert Step.objects.filter(pk=first, position=1).exists()

    def test_removed_from_a_paused_sequence_its_leads_go_on_with_the_next(self, manager, made):
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        manager.post(url(made, "activate/"))
        manager.post(url(made, "pause/"))
        first, second = (s["id"] for s in made["sequence"]["steps"])
        assert manager.delete(url(made, f"steps/{first}/")).status_code == 204
        assert Execution.objects.get(step=first).skip_reason == "step_removed"
        assert Execution.objects.get(step=second).status == "pending"
        assert [s["id"] for s in manager.get(url(made)).json()["steps"]] == [second]

    @pytest.mark.parametrize("path", ["nonsense", UNKNOWN])
    def test_unknown_ids_are_404(self, manager, made, path):
        assert manager.get(url(made, f"steps/{path}/")).status_code == 404
        assert manager.get(f"{API}/sequences/{path}/steps/").status_code == 404
        assert manager.post(f"{API}/sequences/{path}/activate/").status_code == 404

    def test_a_step_removed_meanwhile_is_404(self, manager, made):
        """Two people remove or change it at once: the second finds it after waiting for the sequence."""
        row = Step.objects.get(pk=made["sequence"]["steps"][0]["id"])
        sequences.remove_step(row.sequence_id, row.pk, sequences.Pass(), timezone.now())
        with pytest.raises(Missing):
            sequences.remove_step(row.sequence_id, row.pk, sequences.Pass(), timezone.now())
        with pytest.raises(Missing):
            sequences.change_step(row.sequence_id, row.pk, {"subject": "x"}, sequences.Pass())


class TestEnroll:
    def test_results_in_order_never_twice(self, manager, made):
        lead, unknown = made["lead"]["id"], UNKNOWN
        response = manager.post(url(made, "enroll/"), {"lead_ids": [lead, unknown, lead]})
        assert response.status_code == 200
        results = response.json()["results"]
        assert [r["status"] for r in results] == ["enrolled", "not_found", "already_enrolled"]
        assert results[0]["enrollment_id"] == results[2]["enrollment_id"]
        assert results[1]["enrollment_id"] is None
        again = manager.post(url(made, "enroll/"), {"lead_ids": [lead]}).json()["results"][0]
        assert again["status"] == "already_enrolled"
        assert Enrollment.objects.count() == 1

    def test_who_lacks_an_address_waits_and_the_next_evaluation_completes(self, manager, made):
        """Enrolling ends nothing, so it completes nothing; the address then reopens."""
        body = {"name": "texts", "sender_ids": [], "steps": [step(channel="sms")]}
        sender = manager.post(f"{API}/senders/", {"channel": "sms", "address": "+821011112222"}).json()
        made["sequence"] = manager.post(f"{API}/sequences/", {**body, "sender_ids": [sender["id"]]}).json()
        manager.post(url(made, "activate/"))
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        row = manager.get(url(made)).json()
        assert (row["status"], row["counters"]["waiting"], row["has_pending_work"]) == ("active", 1, False)
        assert manager.post(url(made, "reconcile/")).json()["verdict"] == "completed"
        assert manager.get(f"{API}/step-executions/").json()["results"][0]["status"] == "awaiting_enrichment"
        manager.patch(f"{API}/leads/{made['lead']['id']}/", {"phone": "+821033334444"})
        assert manager.get(f"{API}/step-executions/").json()["results"][0]["status"] == "pending"
        assert manager.get(url(made)).json()["status"] == "active"

    @pytest.mark.parametrize("ids", [[], [UNKNOWN] * 1001, ["x"], [1], "x", None])
    def test_bad_lists_are_400(self, manager, made, ids):
        assert manager.post(url(made, "enroll/"), {"lead_ids": ids}).status_code == 400

    def test_without_steps_409(self, manager, made):
        empty = manager.post(f"{API}/sequences/", {"name": "x"}).json()["id"]
        response = manager.post(f"{API}/sequences/{empty}/enroll/", {"lead_ids": [made["lead"]["id"]]})
        assert codes(response) == [("no_steps", None)]


class TestLeads:
    def test_saving_upserts_the_subscriptions(self, manager):
        body = {"name": "Lee", "email": "Lee@Example.com", "phone": "+821011112222", "time_zone": "Asia/Seoul"}
        lead = manager.post(f"{API}/leads/", body).json()
        found = set(Subscription.objects.filter(user_id=lead["id"]).values_list("type", flat=True))
        assert found == {"Email", "SMS", "KakaoTalk"}
        assert manager.patch(f"{API}/leads/{lead['id']}/", {"phone": None}).json()["phone"] is None
        assert manager.patch(f"{API}/leads/{lead['id']}/", {"email": None}).status_code == 400

    @pytest.mark.parametrize(
        ("body", "attr"),
        [
            ({"name": "x"}, "email"),
            ({"email": "nonsense"}, "email"),
            ({"phone": "010-1234-5678"}, "phone"),
            ({"email": "a@example.com", "name": 5}, "name"),
            ({"email": "a@example.com", "time_zone": "Mars/Base"}, "time_zone"),
            ({"email": "a@example.com", "attributes": []}, "attributes"),
            ({"email": "a@example.com", "id": "x"}, "id"),
            ({"email": "a@example.com", "nope": 1}, "nope"),
        ],
    )
    def test_bad_leads_are_400(self, manager, body, attr):
        response = manager.post(f"{API}/leads/", body)
        assert response.status_code == 400
        assert attr in [error["attr"] for error in response.json()["errors"]]
        assert not Lead.objects.exists()

    def test_the_email_is_unique_without_case(self, manager):
        manager.post(f"{API}/leads/", {"email": "a@example.com"})
        assert codes(manager.post(f"{API}/leads/", {"email": "A@EXAMPLE.com"})) == [("duplicate_lead", "email")]

    def test_bulk(self, manager):
        manager.post(f"{API}/leads/", {"email": "there@example.com"})
        leads = [
            {"email": "new@example.com"},
            {"email": "THERE@example.com"},
            {"email": "x"},
            {"email": "New@example.com"},
            7,
            None,
        ]
        response = manager.post(f"{API}/leads/bulk/", {"leads": leads})
        assert response.status_code == 200
        results = response.json()["results"]
        assert [r["status"] for r in results] == ["created", "exists", "invalid", "exists", "invalid", "invalid"]
        assert [r["index"] for r in results] == [0, 1, 2, 3, 4, 5]
        assert results[0]["id"] == results[3]["id"]
        assert results[2]["errors"][0]["attr"] == "email"
        for bad in ([], [{"email": "a@example.com"}] * 1001):
            assert manager.post(f"{API}/leads/bulk/", {"leads": bad}).status_code == 400


class TestSenders:
    def test_defaults_and_verbs(self, manager, made):
        sender = made["sender"]
        assert (sender["status"], sender["min_gap_seconds"], sender["gap_jitter_seconds"]) == ("active", 0, 0)
        assert (sender["daily_limit"], sender["window_from"], sender["window_zone"]) == (None, None, "lead")
        path = f"{API}/senders/{sender['id']}/"
        assert manager.post(f"{path}activate/").status_code == 409
        assert manager.post(f"{path}suspend/").json()["status"] == "suspended"
        assert manager.post(f"{path}deactivate/").json()["status"] == "inactive"
        assert manager.post(f"{path}suspend/").status_code == 409
        assert manager.post(f"{path}activate/").json()["status"] == "active"
        assert manager.patch(path, {"window_from": "09:00", "window_to": "18:00"}).json()["window_from"] == "09:00:00"
        assert manager.patch(path, {"window_from": "22:00", "window_to": "06:00"}).json()["window_to"] == "06:00:00"
        assert manager.patch(path, {"display_name": "Night shift"}).status_code == 200

    @pytest.mark.parametrize(
        ("changes", "attr"),
        [
            ({"window_from": "09:00"}, "window_to"),
            ({"window_from": "18:00", "window_to": "18:00"}, "window_to"),
            ({"window_days": [0]}, "window_days.0"),
            ({"window_days": []}, "window_days"),
            ({"daily_limit": -1}, "daily_limit"),
            ({"time_zone": "x"}, "time_zone"),
            ({"channel": "sms"}, "channel"),
            ({"status": "error"}, "status"),
            ({"address": "nonsense"}, "address"),
        ],
    )
    def test_bad_changes_are_400(self, manager, made, changes, attr):
        response = manager.patch(f"{API}/senders/{made['sender']['id']}/", changes)
        assert response.status_code == 400
        assert attr in [error["attr"] for error in response.json()["errors"]], response.json()

    def test_impact_and_delete_with_reassign(self, manager, made):
        other = manager.post(f"{API}/senders/", {"channel": "email", "address": "b@shop.example"}).json()
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        path = f"{API}/senders/{made['sender']['id']}/"
        impact = manager.get(f"{path}impact/").json()
        assert (impact["enrollments"], impact["waiting_executions"]) == (1, 1)
        assert [c["id"] for c in impact["candidates"]] == [other["id"]]
        assert manager.delete(f"{path}?reassign_to={UNKNOWN}").status_code == 400
        assert manager.delete(f"{path}?reassign_to=x").status_code == 400
        assert Sender.objects.get(pk=made["sender"]["id"]).deleted_at is None
        assert manager.delete(f"{path}?reassign_to={other['id']}").status_code == 204
        assert str(Enrollment.objects.get().sender_id) == other["id"]
        assert manager.get(path).json()["deleted_at"] is not None
        assert manager.post(f"{path}activate/").status_code == 409

    def test_impact_counts_those_who_hear_from_it_at_a_later_step(self, manager, made):
        sms = manager.post(f"{API}/senders/", {"channel": "sms", "address": "+821012345678"}).json()["id"]
        body = {"name": "Two", "sender_ids": [made["sender"]["id"], sms], "steps": [step(), step(channel="sms")]}
        two = manager.post(f"{API}/sequences/", body).json()["id"]
        manager.post(f"{API}/sequences/{two}/enroll/", {"lead_ids": [made["lead"]["id"]]})
        impact = manager.get(f"{API}/senders/{sms}/impact/").json()
        assert (impact["enrollments"], impact["waiting_executions"], impact["sequences_count"]) == (1, 0, 1)

    def test_recovering_skips_what_became_stale(self, manager):
        sender = SenderFactory(status="error")
        row = work(sender=sender, due=timezone.now() - 20 * DAY)
        manager.post(f"{API}/senders/{sender.pk}/activate/")
        assert Execution.objects.get(pk=row.pk).skip_reason == "stale"


class TestAccess:
    def test_viewer_reads_only(self, viewer, manager, made):
        for path in ("senders", "leads", "sequences", "enrollments", "step-executions", "replies"):
            assert viewer.get(f"{API}/{path}/").status_code == 200, path
            assert viewer.post(f"{API}/{path}/", {}).status_code in (403, 405), path
        assert viewer.post(url(made, "pause/")).status_code == 403

    def test_foreign_rows_are_404(self, make_client, made):
        stranger = make_client("campaign-manager", username="stranger")
        join_application(stranger.user, "elsewhere")
        assert stranger.get(url(made)).status_code == 404
        assert stranger.post(url(made, "activate/")).status_code == 404
        assert stranger.get(url(made, "steps/")).status_code == 404
        assert stranger.get(f"{API}/sequences/").json()["results"] == []
        response = stranger.post(f"{API}/sequences/", {"name": "x", "sender_ids": [made["sender"]["id"]]})
        assert codes(response) == [("does_not_exist", "sender_ids")]

    def test_nobody_is_401(self, client):
        assert client.get(f"{API}/sequences/").status_code == 401


def lock_of(client, made):
    scope = {"lock_scope": "RESOURCE", "resource_type": "sequence", "resource_id": made["sequence"]["id"]}
    body = {"branch_name": "main", "lock_type": "MANUAL", "reason": "editing", **scope}
    response = client.post(f"{API}/branch-locks/acquire/", body)
    assert response.status_code in (200, 201), response.json()
    return response.json()


class TestGate:
    @pytest.fixture
    def held(self, manager, made, make_client):
        """The sequence is ready, and another client holds its lock."""
        manager.post(url(made, "generate/"))
        manager.post(url(made, "mark-ready/"))
        holder = make_client("campaign-manager", "lock-admin", username="holder")
        holder.user.applications.add(*manager.user.applications.all())
        lock = lock_of(holder, made)
        return holder, {"HTTP_X_LOCK_ID": lock["lock_id"], "HTTP_X_LOCK_FENCE": str(lock["fence"])}

    def test_who_holds_no_lock_gets_423_and_the_holder_writes(self, manager, made, held):
        holder, headers = held
        writes = [
            lambda client, **h: client.patch(url(made), {"name": "new"}, **h),
            lambda client, **h: client.post(url(made, "steps/"), step(), **h),
            lambda client, **h: client.post(url(made, "activate/"), **h),
        ]
        for write in writes:
            assert write(manager).status_code == 423
            assert write(holder).status_code == 423
            assert write(holder, **{**headers, "HTTP_X_LOCK_FENCE": "0"}).status_code == 409
            assert write(holder, **headers).status_code in (200, 201)
        assert manager.delete(url(made)).status_code == 423

    def test_the_gate_is_asked_before_the_body_is_judged(self, manager, made, held):
        first = made["sequence"]["steps"][0]["id"]
        assert manager.patch(url(made), {"harvest_days": 0}).status_code == 423
        assert manager.patch(url(made), {"steps": []}).status_code == 423
        assert manager.post(url(made, "steps/"), {"channel": "fax"}).status_code == 423
        assert manager.patch(url(made, f"steps/{first}/"), {"surplus": 1}).status_code == 423
        assert manager.post(url(made, "activate/"), {"surplus": 1}).status_code == 423
        holder, headers = held
        assert codes(holder.patch(url(made), {"harvest_days": 0}, **headers)) == [("min_value", "harvest_days")]

    def test_the_description_names_the_gated_writes_and_their_headers(self):
        paths = SchemaGenerator().get_schema(request=None, public=True)["paths"]
        described = {
            (verb, path.removeprefix(f"{API}/sequences/")): {parameter["name"] for parameter in operation["parameters"]}
            for path, verbs in paths.items()
            for verb, operation in verbs.items()
            if path.startswith(f"{API}/sequences/") and "423" in operation["responses"]
        }
        assert set(described) == {
            ("patch", "{id}/"), ("delete", "{id}/"), ("post", "{id}/activate/"), ("post", "{id}/reactivate/"),
            ("post", "{sequence_id}/steps/"), ("patch", "{sequence_id}/steps/{id}/"),
            ("delete", "{sequence_id}/steps/{id}/"),
        }  # fmt: skip
        assert all({"X-Lock-Id", "X-Lock-Fence"} <= names for names in described.values())

    def test_pause_enroll_and_archive_pass(self, manager, made, held):
        holder, headers = held
        holder.post(url(made, "activate/"), **headers)
        assert manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]}).status_code == 200
        assert manager.post(url(made, "pause/")).status_code == 200
        assert manager.post(url(made, "archive/")).status_code == 200

    def test_a_draft_is_nobodys_concern_but_activating_is(self, manager, made, make_client):
        lock_of(make_client("lock-admin", username="holder"), made)
        assert manager.patch(url(made), {"name": "other"}).json()["name"] == "other"
        assert manager.post(url(made, "steps/"), step()).status_code == 201
        assert manager.post(url(made, "activate/")).status_code == 423

    def test_malformed_headers_are_400(self, manager, made, held):
        assert manager.patch(url(made), {"name": "x"}, HTTP_X_LOCK_ID="x", HTTP_X_LOCK_FENCE="1").status_code == 400


class TestEnrollments:
    @pytest.fixture
    def enrolled(self, manager, made):
        manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
        manager.post(url(made, "activate/"))
        return f"{API}/enrollments/{Enrollment.objects.get().pk}/"

    def test_pause_resume_stop(self, manager, enrolled):
        later = (timezone.now() + DAY).isoformat()
        assert manager.post(f"{enrolled}pause/", {"resume_at": "yesterday"}).status_code == 400
        assert manager.post(f"{enrolled}pause/", {"resume_at": "2020-01-01T00:00:00Z"}).status_code == 400
        row = manager.post(f"{enrolled}pause/", {"resume_at": later}).json()
        assert (row["status"], row["resume_at"] is not None) == ("paused", True)
        assert manager.post(f"{enrolled}pause/").status_code == 409
        assert manager.post(f"{enrolled}resume/").json()["status"] == "active"
        assert manager.post(f"{enrolled}stop/").json()["status"] == "stopped"
        assert manager.post(f"{enrolled}stop/").status_code == 409

    def test_explain_names_the_gates_in_order(self, manager, enrolled, made):
        said = manager.get(f"{enrolled}explain/").json()
        names = ["sequence_status", "enrollment", "suppression", "window", "sender_health", "allowance"]
        assert [gate["name"] for gate in said["gates"]] == [*names, "queue_position", "eta"]
        assert said["decides"] is None
        assert said["execution_id"] == str(Execution.objects.get().pk)
        assert set(said["gates"][0]) == {"name", "ok", "value", "detail"}
        manager.post(url(made, "pause/"))
        assert manager.get(f"{enrolled}explain/").json()["decides"] == "sequence_status"

    @pytest.mark.parametrize(
        ("break_it", "gate"),
        [
            (lambda: Enrollment.objects.update(status="paused"), "enrollment"),
            (lambda: Enrollment.objects.update(status="stopped"), "enrollment"),
            (lambda: Subscription.objects.update(status=-2), "suppression"),
            (lambda: Sender.objects.update(window_days=[(timezone.now() + DAY).isoweekday()]), "window"),
            (lambda: Sender.objects.update(status="error", last_error="535"), "sender_health"),
            (lambda: Enrollment.objects.update(sender=None), "sender_health"),
            (lambda: Sender.objects.update(daily_limit=0), "allowance"),
            (lambda: Execution.objects.update(scheduled_at=timezone.now() + DAY), "eta"),
        ],
    )
    def test_explain_says_which_gate_decides(self, manager, enrolled, break_it, gate):
        break_it()
        assert manager.get(f"{enrolled}explain/").json()["decides"] == gate

    def test_what_messaging_has_is_held_by_no_gate_of_its_sender(self, manager, enrolled, sweep):
        Sender.objects.update(daily_limit=1)
        sweep("send_due_steps", timezone.now())
        said = manager.get(f"{enrolled}explain/").json()
        assert (said["decides"], said["gates"][5]["value"], said["gates"][5]["ok"]) == (None, 0, True)

    def test_marketing_needs_consent(self, manager, enrolled):
        Sequence.objects.update(kind="marketing")
        gate = manager.get(f"{enrolled}explain/").json()["gates"][2]
        assert (gate["ok"], gate["value"]) == (False, "no_consent")
        Subscription.objects.update(marketing_consent=True)
        assert manager.get(f"{enrolled}explain/").json()["decides"] is None

    def test_nobody_foretells_when_the_suppressed_are_written_to(self, manager, enrolled):
        Subscription.objects.update(status=-2)
        assert manager.get(f"{enrolled}explain/").json()["eta"] is None

    def test_of_those_enrolled_together_one_is_the_first_in_the_queue(self, manager, enrolled, made):
        more = [manager.post(f"{API}/leads/", {"name": "x", "email": f"{n}@example.com"}).json()["id"] for n in "ab"]
        manager.post(url(made, "enroll/"), {"lead_ids": more})
        Execution.objects.update(scheduled_at=timezone.now() - HOUR)
        Sender.objects.update(daily_limit=1)
        rows = Execution.objects.order_by("pk").values_list("enrollment_id", flat=True)
        said = [manager.get(f"{API}/enrollments/{pk}/explain/").json() for pk in rows]
        assert [answer["gates"][6]["value"] for answer in said] == [1, 2, 3]
        assert [answer["decides"] for answer in said] == [None, "queue_position", "queue_position"]

    def test_filters(self, manager, enrolled, made):
        one = Enrollment.objects.get()
        for query in (
            f"sequence_id={one.sequence_id}",
            f"lead_id={one.lead_id}",
            f"sender_id={one.sender_id}",
            "status=active",
        ):
            assert len(manager.get(f"{API}/enrollments/?{query}").json()["results"]) == 1, query
            assert manager.get(f"{API}/step-executions/?{query.replace('active', 'pending')}").status_code == 200
        assert len(manager.get(f"{API}/step-executions/?enrollment_id={one.pk}").json()["results"]) == 1
        assert manager.get(f"{API}/enrollments/?status=nope").status_code == 400

    def test_replies(self, manager, enrolled):
        pk = str(Enrollment.objects.get().pk)
        body = {"enrollment_id": pk, "text": "yes please", "external_id": "m-1"}
        first = manager.post(f"{API}/replies/", body)
        assert (first.status_code, first.json()["kind"]) == (201, "human")
        again = manager.post(f"{API}/replies/", body)
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        assert manager.get(enrolled).json()["status"] == "replied"
        assert manager.post(f"{API}/replies/", {"text": "x"}).status_code == 400
        assert codes(manager.post(f"{API}/replies/", {"enrollment_id": UNKNOWN})) == [
            ("does_not_exist", "enrollment_id")
        ]
        assert manager.post(f"{API}/replies/", {"message_id": UNKNOWN, "text": ""}).status_code == 404
        assert manager.post(f"{API}/replies/", {"message_id": f"<{UNKNOWN}@y>", "text": ""}).status_code == 404
        assert codes(manager.post(f"{API}/replies/", {"message_id": "<x@y>"})) == [("invalid", "message_id")]
        assert manager.post(f"{API}/replies/", {"in_reply_to": "<x@y>", "text": ""}).status_code == 404
        assert manager.post(f"{API}/replies/", {"references": ["<x@y>"], "text": ""}).status_code == 404
        future = (timezone.now() + HOUR).isoformat()
        assert codes(manager.post(f"{API}/replies/", {"enrollment_id": pk, "received_at": future})) == [
            ("invalid", "received_at")
        ]

    @pytest.mark.parametrize("when", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
    def test_times_beyond_reckoning_are_400(self, manager, enrolled, when):
        Lead.objects.update(time_zone="America/New_York")
        pk = str(Enrollment.objects.get().pk)
        away = {"enrollment_id": pk, "kind": "ooo", "text": "back on 25 November"}
        for name in ("received_at", "ooo_until"):
            assert codes(manager.post(f"{API}/replies/", {**away, name: when})) == [("out_of_range", name)]
        assert codes(manager.post(f"{enrolled}pause/", {"resume_at": when})) == [("out_of_range", "resume_at")]

    def test_who_gives_the_date_of_return_says_that_the_lead_is_away(self, manager, enrolled):
        body = {"enrollment_id": str(Enrollment.objects.get().pk), "text": "", "ooo_until": "2100-01-01T09:00:00Z"}
        assert manager.post(f"{API}/replies/", body).json()["kind"] == "ooo"
        assert manager.get(enrolled).json()["resume_at"] == "2100-01-01T09:00:00Z"

    def test_a_bounce_suppresses(self, manager, enrolled):
        manager.post(f"{API}/replies/", {"enrollment_id": str(Enrollment.objects.get().pk), "kind": "bounce"})
        assert Suppression.objects.get().reason == "hard_bounce"


def test_reenroll_failed_over_rest(manager, made):
    manager.post(url(made, "enroll/"), {"lead_ids": [made["lead"]["id"]]})
    manager.post(url(made, "activate/"))
    Execution.objects.update(status="processing", processing_started_at=timezone.now())
    Execution.objects.update(status="failed", executed_at=timezone.now())
    Enrollment.objects.update(status="failed")
    assert manager.post(url(made, "reconcile/")).json()["verdict"] == "completed"
    said = manager.post(url(made, "reenroll-failed/")).json()
    assert [row["lead_id"] for row in said["taken"]] == [made["lead"]["id"]]
    assert said["refused"] == []
    assert manager.get(url(made)).json()["status"] == "active"


def test_integrity_lists_the_names(operator):
    SequenceFactory()
    names = {row["name"]: row["severity"] for row in operator.get(f"{API}/integrity/").json()}
    wanted = [
        "stuck_completion",
        "signal_drift",
        "orphans",
        "completed_with_work",
        "overdue",
        "stuck_processing",
        "counters",
    ]
    assert {f"campaigns.{name}" for name in wanted} <= set(names)
    assert names["campaigns.overdue"] == "info"


def test_pages_of_sequences_cost_the_same_however_many(manager, made, django_assert_max_num_queries):
    application = Sequence.objects.get().application
    for sequence in SequenceFactory.create_batch(10, application=application):
        StepFactory(sequence=sequence)
        pool(sequence, SenderFactory(application=application))
    with django_assert_max_num_queries(12):
        assert len(manager.get(f"{API}/sequences/").json()["results"]) == 11
