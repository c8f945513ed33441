"""The outbox of webhooks: a change of a message's status, for each endpoint of its application."""

import pgtrigger

from messaging.triggers import HAPPENED_AT

TOLD = (
    "id", "subscription_id", "user_id", "channel_type", "kind", "campaign", "status", "created_at", "scheduled_at",
    "sent_at", "received_at", "converted_at", "failed_at", "error_reason", "failure_type", "next_attempt_at",
    "receipt_implied", "provider_message_id",
)  # fmt: skip

# The look at the (small, cached) table of endpoints is all that an installation without webhooks pays. EXECUTE, so that
# it is planned for as many rows as there are.
WEBHOOK_OUTBOX = pgtrigger.Trigger(
    name="webhook_outbox",
    level=pgtrigger.Statement,
    when=pgtrigger.After,
    operation=pgtrigger.Update,
    referencing=pgtrigger.Referencing(old="old_rows", new="new_rows"),
    func=f"""
        IF NOT EXISTS (SELECT FROM webhook_endpoints WHERE active) THEN RETURN NULL; END IF;
        EXECUTE $sql$
        INSERT INTO webhook_deliveries (endpoint_id, message_id, event_type, payload)
        SELECT e.id, n.id, 'message.' || n.status, jsonb_build_object(
                   'type', 'message.' || n.status,
                   'timestamp', COALESCE({HAPPENED_AT.format(old="o", new="n")}, now()),
                   'data', jsonb_build_object({", ".join(f"'{name}', n.{name}" for name in TOLD)},
                       'application', a.slug, 'previous_status', o.status,
                       'retry_of', n.retry_of_id, 'failover_of', n.failover_of_id))
          FROM new_rows n JOIN old_rows o ON o.id = n.id
          JOIN webhook_endpoints e ON e.application_id = n.application_id AND e.active
          JOIN applications a ON a.id = n.application_id
         WHERE o.status IS DISTINCT FROM n.status
        $sql$;
        RETURN NULL;
    """,
)
