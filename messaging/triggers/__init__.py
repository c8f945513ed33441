"""History that no path can forget, and counters that follow from it. The state graph itself is not here."""

import pgtrigger

# Literal states only: this is SQL. The transition's name follows from where it starts and ends.
TRANSITION = """
    CASE WHEN old_status = 'pending' AND new_status = 'successful' THEN 'send'
         WHEN old_status = 'successful' AND new_status = 'failed' AND reason = 'receipt_timeout' THEN 'timeout'
         WHEN new_status = 'failed' THEN 'fail'
         WHEN new_status = 'errored' THEN 'error'
         WHEN old_status = 'errored' AND new_status = 'pending' THEN 'retry'
         WHEN old_status = 'received' AND new_status = 'received' THEN 'expire'
         WHEN new_status = 'received' THEN 'receive'
         WHEN new_status = 'converted' THEN 'convert' END
"""

# Each state's own time, so that what a sweep does "as of T" is told as of T. A retry that names no time happens now.
HAPPENED_AT = """
    CASE {new}.status WHEN 'successful' THEN {new}.sent_at
                      WHEN 'received' THEN CASE WHEN {old}.status = 'received' THEN {new}.expired_at
                                                ELSE {new}.received_at END
                      WHEN 'converted' THEN {new}.converted_at
                      WHEN 'failed' THEN {new}.failed_at
                      WHEN 'errored' THEN ({new}.error_details->>'errored_at')::timestamptz
                      WHEN 'pending' THEN CASE WHEN {new}.retried_at IS DISTINCT FROM {old}.retried_at
                                               THEN {new}.retried_at END END
"""

VERSION_HISTORY = pgtrigger.Trigger(
    name="version_history",
    when=pgtrigger.Before,
    operation=pgtrigger.Update,
    # Whoever writes the next version beside the state, as the dispatcher does for whole batches, is not asked again.
    condition=pgtrigger.Condition(
        "OLD.version IS NOT DISTINCT FROM NEW.version AND (OLD.status IS DISTINCT FROM NEW.status"
        " OR (OLD.expired_at IS NULL AND NEW.expired_at IS NOT NULL))"
    ),
    declare=[("old_status", "text"), ("new_status", "text"), ("reason", "text")],
    func=f"""
        old_status := OLD.status; new_status := NEW.status; reason := NEW.error_reason;
        NEW.version := OLD.version + 1;
        NEW.version_history := OLD.version_history || jsonb_build_object(NEW.version::text, jsonb_build_object(
            'at', COALESCE({HAPPENED_AT.format(old="OLD", new="NEW")}, now()),
            'transition', {TRANSITION}, 'from', OLD.status, 'to', NEW.status));
        RETURN NEW;
    """,
)

# What belongs to errored ends with it, and the retry is counted, whoever fires it, unless the same statement says
# otherwise. A set-up fault of ours is not counted.
RETRY_CLEARS = pgtrigger.Trigger(
    name="retry_clears",
    when=pgtrigger.Before,
    operation=pgtrigger.Update,
    condition=pgtrigger.Condition("OLD.status = 'errored' AND NEW.status = 'pending'"),
    func="""
        IF (OLD.network_retries, OLD.outage_retries, OLD.rate_limited_retries)
           = (NEW.network_retries, NEW.outage_retries, NEW.rate_limited_retries) THEN
            NEW.network_retries := OLD.network_retries + (OLD.failure_type = 'network')::int;
            NEW.outage_retries := OLD.outage_retries + (OLD.failure_type = 'outage')::int;
            NEW.rate_limited_retries := OLD.rate_limited_retries + (OLD.failure_type = 'rate_limited')::int;
        END IF;
        IF OLD.next_attempt_at IS NOT DISTINCT FROM NEW.next_attempt_at THEN NEW.next_attempt_at := NULL; END IF;
        NEW.failure_type := NULL; NEW.error_reason := NULL; NEW.error_details := '{}';
        RETURN NEW;
    """,
)

# Subscriptions with the same tags are one segment, by which messages are counted. So many per application, no more:
# where tags tell single people apart, counting by them would keep more figures than there are messages.
MOST_SEGMENTS = 1000
_SEGMENT = f"""
    SELECT id INTO NEW.segment FROM message_segments
     WHERE application_id = NEW.application_id AND mark = md5(NEW.tags::text);
    IF NEW.segment IS NULL AND (SELECT count(*) FROM message_segments WHERE application_id = NEW.application_id)
                               < {MOST_SEGMENTS} THEN
        INSERT INTO message_segments (application_id, mark, tags)
        VALUES (NEW.application_id, md5(NEW.tags::text), NEW.tags)
        ON CONFLICT (application_id, mark) DO NOTHING RETURNING id INTO NEW.segment;
        IF NEW.segment IS NULL THEN
            SELECT id INTO NEW.segment FROM message_segments
             WHERE application_id = NEW.application_id AND mark = md5(NEW.tags::text);
        END IF;
    END IF;
    RETURN NEW;
"""
SEGMENT_TRIGGERS = [
    pgtrigger.Trigger(name="segment_born", when=pgtrigger.Before, operation=pgtrigger.Insert, func=_SEGMENT),
    # Also when a writer that knows nothing of it puts back what it has read before.
    pgtrigger.Trigger(
        name="segment_moved",
        when=pgtrigger.Before,
        operation=pgtrigger.Update,
        condition=pgtrigger.Condition("OLD.tags IS DISTINCT FROM NEW.tags OR OLD.segment IS DISTINCT FROM NEW.segment"),
        func=_SEGMENT,
    ),
]

# The channel is the subscription's; a row written by hand need not repeat it, nor know the segment.
CHANNEL_OF_SUBSCRIPTION = pgtrigger.Trigger(
    name="channel_of_subscription",
    when=pgtrigger.Before,
    operation=pgtrigger.Insert,
    condition=pgtrigger.Condition(
        "COALESCE(NEW.subscription_type, '') = '' OR COALESCE(NEW.channel_type, '') = '' OR NEW.segment IS NULL"
    ),
    func="""
        SELECT COALESCE(NULLIF(NEW.subscription_type, ''), s.type),
               COALESCE(NULLIF(NEW.channel_type, ''), s.channel_type), s.segment
          INTO NEW.subscription_type, NEW.channel_type, NEW.segment
          FROM subscriptions s WHERE s.id = NEW.subscription_id;
        RETURN NEW;
    """,
)

MESSAGE_CREATED = pgtrigger.Trigger(
    name="event_created",
    level=pgtrigger.Statement,
    when=pgtrigger.After,
    operation=pgtrigger.Insert,
    referencing=pgtrigger.Referencing(new="new_rows"),
    func="""
        INSERT INTO message_events (message_id, event_type, occurred_at, metadata)
        SELECT id, 'created', created_at, '{}' FROM new_rows;
        RETURN NULL;
    """,
)

# One statement for all rows of the UPDATE. Writing the same status is no transition and leaves no event. EXECUTE, so
# that it is planned anew: a plan kept from an UPDATE of one row is a nested loop, and takes a batch of 500 three times
# as long as the UPDATE itself.
MESSAGE_MOVED = pgtrigger.Trigger(
    name="event_moved",
    level=pgtrigger.Statement,
    when=pgtrigger.After,
    operation=pgtrigger.Update,
    referencing=pgtrigger.Referencing(old="old_rows", new="new_rows"),
    func=f"""
        EXECUTE $moved$
        INSERT INTO message_events (message_id, event_type, occurred_at, metadata)
        SELECT n.id,
               CASE n.status WHEN 'successful' THEN 'sent' WHEN 'pending' THEN 'retried' ELSE n.status END,
               COALESCE({HAPPENED_AT.format(old="o", new="n")}, now()),
               jsonb_strip_nulls(CASE n.status
                   WHEN 'failed' THEN jsonb_build_object(
                       'reason', n.error_reason, 'code', n.error_details->'code', 'scope', n.error_details->'scope')
                   WHEN 'errored' THEN jsonb_build_object('failure_type', n.failure_type,
                       'code', n.error_details->'code', 'next_attempt_at', n.next_attempt_at)
                   WHEN 'pending' THEN jsonb_build_object('failure_type', o.failure_type)
                   WHEN 'received' THEN CASE WHEN n.receipt_implied THEN '{{"implied": true}}'::jsonb
                                             ELSE '{{}}'::jsonb END
                   WHEN 'converted' THEN n.conversion
                   ELSE '{{}}'::jsonb END)
          FROM new_rows n JOIN old_rows o ON o.id = n.id
         WHERE o.status IS DISTINCT FROM n.status
        $moved$;
        RETURN NULL;
    """,
)

# A receipt raises its subscription's counter, whoever records it.
COUNT_RECEIPTS = pgtrigger.Trigger(
    name="count_receipts",
    when=pgtrigger.After,
    operation=pgtrigger.Update,
    condition=pgtrigger.Condition("OLD.status IS DISTINCT FROM NEW.status AND NEW.status IN ('received', 'converted')"),
    func="""
        UPDATE subscriptions
           SET total_messages_received = total_messages_received + (NEW.status = 'received')::int,
               total_messages_converted = total_messages_converted + (NEW.status = 'converted')::int,
               last_active_at = GREATEST(last_active_at, COALESCE(NEW.converted_at, NEW.received_at))
         WHERE id = NEW.subscription_id;
        RETURN NULL;
    """,
)

SUBSCRIPTION_EVENTS = pgtrigger.Trigger(
    name="events",
    when=pgtrigger.After,
    operation=pgtrigger.Insert | pgtrigger.Update,
    func="""
        IF TG_OP = 'INSERT' THEN
            INSERT INTO subscription_events (subscription_id, event_type, status, reason)
            VALUES (NEW.id, 'created', NEW.status, NEW.status_reason);
            RETURN NULL;
        END IF;
        IF OLD.status IS DISTINCT FROM NEW.status THEN
            INSERT INTO subscription_events (subscription_id, event_type, status, reason)
            VALUES (NEW.id, CASE WHEN NEW.status > 0 THEN 'subscribed' WHEN NEW.status IN (-2, -31) THEN 'unsubscribed'
                                 ELSE 'error' END, NEW.status, NEW.status_reason);
        END IF;
        IF OLD.token_hash IS DISTINCT FROM NEW.token_hash THEN
            INSERT INTO subscription_events (subscription_id, event_type, status, reason)
            VALUES (NEW.id, 'token_updated', NEW.status, '');
        END IF;
        IF OLD.user_id IS DISTINCT FROM NEW.user_id THEN
            INSERT INTO subscription_events (subscription_id, event_type, status, reason)
            VALUES (NEW.id, CASE WHEN NEW.user_id IS NULL THEN 'user_unlinked' ELSE 'user_linked' END, NEW.status, '');
        END IF;
        RETURN NULL;
    """,
)

# An edit is a new version, also one by hand that does not say so.
TEMPLATE_EDITED = pgtrigger.Trigger(
    name="edited",
    when=pgtrigger.Before,
    operation=pgtrigger.Update,
    condition=pgtrigger.Condition(
        "OLD.version IS NOT DISTINCT FROM NEW.version AND"
        " (OLD.name, OLD.title_template, OLD.body_template, OLD.data_template, OLD.provider_code) IS DISTINCT FROM"
        " (NEW.name, NEW.title_template, NEW.body_template, NEW.data_template, NEW.provider_code)"
    ),
    func="NEW.version := OLD.version + 1; RETURN NEW;",
)

TEMPLATE_VERSIONS = pgtrigger.Trigger(
    name="versions",
    when=pgtrigger.After,
    operation=pgtrigger.Insert | pgtrigger.Update,
    func="""
        IF TG_OP = 'UPDATE' AND OLD.version IS NOT DISTINCT FROM NEW.version THEN RETURN NULL; END IF;
        INSERT INTO message_template_versions
            (template_id, version, name, title_template, body_template, data_template, provider_code)
        VALUES (NEW.id, NEW.version, NEW.name, NEW.title_template, NEW.body_template, NEW.data_template,
                NEW.provider_code);
        RETURN NULL;
    """,
)

# A closed breaker starts to count anew, also when somebody closes it by hand.
FORGET_FAILURES = pgtrigger.Trigger(
    name="forget_failures",
    when=pgtrigger.After,
    operation=pgtrigger.Delete,
    func="DELETE FROM provider_failures WHERE provider = OLD.provider; RETURN NULL;",
)

# Nobody counts while there is no quota, so what was counted before is not the truth any more.
FORGET_USAGE = pgtrigger.Trigger(
    name="forget_usage",
    when=pgtrigger.After,
    operation=pgtrigger.Update,
    condition=pgtrigger.Condition("NEW.daily_quota IS NULL AND NEW.monthly_quota IS NULL"),
    func="DELETE FROM quota_usage WHERE application_id = NEW.id; RETURN NULL;",
)

# Whoever moves a message to another day by hand moves its charge: the days from the earlier one on are counted anew
# from the messages, when somebody next asks. Without a quota there is nothing to forget.
RECOUNT_USAGE = pgtrigger.Trigger(
    name="recount_usage",
    when=pgtrigger.After,
    operation=pgtrigger.UpdateOf("created_at"),
    condition=pgtrigger.Condition(
        "OLD.created_at IS DISTINCT FROM NEW.created_at"
        " AND (OLD.created_at AT TIME ZONE 'UTC')::date IS DISTINCT FROM (NEW.created_at AT TIME ZONE 'UTC')::date"
    ),
    func="""
        DELETE FROM quota_usage
         WHERE application_id = NEW.application_id
           AND day >= (LEAST(OLD.created_at, NEW.created_at) AT TIME ZONE 'UTC')::date;
        RETURN NULL;
    """,
)
