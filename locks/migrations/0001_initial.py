
import django.db.models.deletion
import django.db.models.functions.datetime
import django.db.models.functions.text
import django.db.models.lookups
import pgtrigger.compiler
import pgtrigger.migrations
import uuid_utils.compat
from django.db import migrations, models

# The rule of scopes as one constraint over ranges, which needs no extension: a value is a one-point range, a missing
# one (NULL bounds) covers everything. The range is over the text itself, compared byte by byte, so unlike hashes two
# resources never collide. As expressions, not columns: a bare INSERT cannot get them wrong.
EXCLUSIVE = """
    CREATE TYPE lock_text_range AS RANGE (subtype = text, collation = "C");
    ALTER TABLE branch_locks ADD CONSTRAINT branch_locks_exclusive EXCLUDE USING gist (
        int8range(branch_id, branch_id, '[]') WITH &&,
        lock_text_range(resource_type, resource_type, '[]') WITH &&,
        lock_text_range(resource_id, resource_id, '[]') WITH &&
    ) WHERE (state = 'active');
    -- Not in the models: django-fsm refuses what the ORM reads back from a database default.
    ALTER TABLE branches ALTER state SET DEFAULT 'ACTIVE';
    ALTER TABLE branch_locks ALTER state SET DEFAULT 'active';
    ALTER TABLE branch_lock_waiters ALTER state SET DEFAULT 'waiting';
    -- Room on the page for heartbeats, which touch no index.
    ALTER TABLE branch_locks SET (fillfactor = 70);
"""
NOT_EXCLUSIVE = """
    ALTER TABLE branch_locks DROP CONSTRAINT branch_locks_exclusive;
    DROP TYPE lock_text_range;
"""


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='BranchLock',
            fields=[
                ('id', models.UUIDField(db_default=models.Func(function='gen_random_uuid'), default=uuid_utils.compat.uuid7, editable=False, primary_key=True, serialize=False)),
                ('lock_type', models.TextField(choices=[('INDEXING', 'indexing'), ('MIGRATION', 'migration'), ('BACKUP', 'backup'), ('MAINTENANCE', 'maintenance'), ('MANUAL', 'manual')], verbose_name='type')),
                ('lock_scope', models.TextField(choices=[('BRANCH', 'branch'), ('RESOURCE_TYPE', 'resource type'), ('RESOURCE', 'resource')], verbose_name='scope')),
                ('resource_type', models.TextField(blank=True, null=True, verbose_name='resource type')),
                ('resource_id', models.TextField(blank=True, null=True, verbose_name='resource')),
                ('locked_by', models.TextField(verbose_name='holder')),
                ('reason', models.TextField(verbose_name='reason')),
                ('locked_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name='locked')),
                ('expires_at', models.DateTimeField(verbose_name='expires')),
                ('heartbeat_interval', models.IntegerField(db_default=0, default=0, verbose_name='heartbeat interval')),
                ('last_heartbeat', models.DateTimeField(blank=True, null=True, verbose_name='last heartbeat')),
                ('heartbeat_source', models.TextField(blank=True, null=True, verbose_name='heartbeat source')),
                ('status', models.TextField(blank=True, null=True, verbose_name='reported status')),
                ('progress', models.FloatField(blank=True, null=True, verbose_name='progress')),
                ('estimated_remaining_hours', models.FloatField(blank=True, null=True, verbose_name='estimated remaining hours')),
                ('estimated_at', models.DateTimeField(blank=True, null=True, verbose_name='estimated at')),
                ('auto_release_enabled', models.BooleanField(db_default=True, default=True, verbose_name='auto-release')),
                ('lock_delay', models.FloatField(db_default=0, default=0, verbose_name='delay after expiry')),
                ('fence', models.BigIntegerField(db_default=0, default=0, verbose_name='fence')),
                ('state', models.CharField(choices=[('active', 'active'), ('released', 'released'), ('expired', 'expired'), ('force_released', 'force-released')], default='active', max_length=20, verbose_name='state')),
                ('released_at', models.DateTimeField(blank=True, null=True, verbose_name='ended')),
                ('released_by', models.TextField(blank=True, null=True, verbose_name='ended by')),
                ('expired_at', models.DateTimeField(blank=True, null=True, verbose_name='instant of expiry')),
                ('metadata', models.JSONField(blank=True, db_default={}, default=dict, verbose_name='metadata')),
                ('ttl_source', models.TextField(db_default='default', default='default', verbose_name='TTL from')),
                ('idempotency_key', models.TextField(blank=True, editable=False, null=True)),
                ('fingerprint', models.TextField(blank=True, editable=False, null=True)),
                ('silent_after', models.DateTimeField(blank=True, editable=False, null=True)),
            ],
            options={
                'verbose_name': 'lock',
                'verbose_name_plural': 'locks',
                'db_table': 'branch_locks',
                'permissions': [('hold_locks', 'Can acquire and hold locks'), ('administer_locks', "Can force-unlock, take MANUAL locks and act on others' locks")],
            },
        ),
        migrations.CreateModel(
            name='LockEvent',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('kind', models.TextField(choices=[('ACQUIRED', 'acquired'), ('EXTENDED', 'extended'), ('RELEASED', 'released'), ('EXPIRED_TTL', 'expired (time)'), ('EXPIRED_HEARTBEAT', 'expired (silence)'), ('FORCE_RELEASED', 'force-released'), ('CONFLICT', 'conflict'), ('WAIT_QUEUED', 'queued'), ('GRANTED', 'granted'), ('STATE_CHANGED', 'state changed'), ('HEARTBEAT', 'heartbeat')], verbose_name='kind')),
                ('actor', models.TextField(verbose_name='actor')),
                ('reason', models.TextField(db_default='', default='', verbose_name='reason')),
                ('fence', models.BigIntegerField(null=True, verbose_name='fence')),
                ('details', models.JSONField(db_default={}, default=dict, verbose_name='details')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name='at')),
            ],
            options={
                'verbose_name': 'lock event',
                'verbose_name_plural': 'lock events',
                'db_table': 'branch_lock_events',
            },
        ),
        migrations.CreateModel(
            name='LockWaiter',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('client', models.TextField(verbose_name='client')),
                ('lock_type', models.TextField(choices=[('INDEXING', 'indexing'), ('MIGRATION', 'migration'), ('BACKUP', 'backup'), ('MAINTENANCE', 'maintenance'), ('MANUAL', 'manual')], verbose_name='type')),
                ('lock_scope', models.TextField(choices=[('BRANCH', 'branch'), ('RESOURCE_TYPE', 'resource type'), ('RESOURCE', 'resource')], verbose_name='scope')),
                ('resource_type', models.TextField(null=True, verbose_name='resource type')),
                ('resource_id', models.TextField(null=True, verbose_name='resource')),
                ('terms', models.JSONField(db_default={}, default=dict, verbose_name='terms')),
                ('idempotency_key', models.TextField(null=True)),
                ('state', models.CharField(choices=[('waiting', 'waiting'), ('granted', 'granted'), ('timed_out', 'timed out'), ('gone', 'gone')], default='waiting', max_length=20, verbose_name='state')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name='queued')),
                ('deadline_at', models.DateTimeField(verbose_name='waits until')),
                ('claimed_at', models.DateTimeField(null=True, verbose_name='picked up')),
            ],
            options={
                'verbose_name': 'waiter',
                'verbose_name_plural': 'waiters',
                'db_table': 'branch_lock_waiters',
            },
        ),
        migrations.CreateModel(
            name='Branch',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('name', models.TextField(unique=True, verbose_name='name')),
                ('state', models.CharField(choices=[('ACTIVE', 'active'), ('LOCKED_FOR_WRITE', 'locked for write'), ('READY', 'ready'), ('ARCHIVED', 'archived'), ('ERROR', 'error')], default='ACTIVE', max_length=20, verbose_name='state')),
                ('fence', models.BigIntegerField(db_default=0, default=0, verbose_name='fence')),
                ('indexing_started_at', models.DateTimeField(blank=True, null=True, verbose_name='indexing started')),
                ('indexing_completed_at', models.DateTimeField(blank=True, null=True, verbose_name='indexing completed')),
                ('indexing_service', models.TextField(blank=True, null=True, verbose_name='indexing service')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name='created')),
            ],
            options={
                'verbose_name': 'branch',
                'verbose_name_plural': 'branches',
                'db_table': 'branches',
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[^/[:space:][:cntrl:]]+(/[^/[:space:][:cntrl:]]+)*$'), ('name__regex', '^.{1,200}$')), name='branches_name')],
            },
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='branch',
            trigger=pgtrigger.compiler.Trigger(name='state_born', sql=pgtrigger.compiler.UpsertTriggerSql(condition='WHEN (NEW."state" NOT IN (\'ACTIVE\'))', func='RAISE EXCEPTION \'a new row of branches cannot be %\', NEW."state" USING ERRCODE = \'check_violation\', CONSTRAINT = \'branches_state_graph\', TABLE = \'branches\', COLUMN = \'state\';', hash='c33f12950753caa3ed5febf2903295aed2da6e4c', operation='INSERT', pgid='pgtrigger_state_born_37bd9', table='branches', when='BEFORE')),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='branch',
            trigger=pgtrigger.compiler.Trigger(name='state_edge', sql=pgtrigger.compiler.UpsertTriggerSql(condition='WHEN (OLD."state" IS DISTINCT FROM NEW."state" AND NOT ((OLD."state" = \'ACTIVE\' AND NEW."state" IN (\'ARCHIVED\', \'ERROR\', \'LOCKED_FOR_WRITE\')) OR (OLD."state" = \'LOCKED_FOR_WRITE\' AND NEW."state" IN (\'ACTIVE\', \'ERROR\', \'READY\')) OR (OLD."state" = \'READY\' AND NEW."state" IN (\'ACTIVE\', \'ARCHIVED\')) OR (OLD."state" = \'ERROR\' AND NEW."state" IN (\'ACTIVE\', \'LOCKED_FOR_WRITE\'))))', func='RAISE EXCEPTION \'branches cannot go from % to %\', OLD."state", NEW."state" USING ERRCODE = \'check_violation\', CONSTRAINT = \'branches_state_graph\', TABLE = \'branches\', COLUMN = \'state\';', hash='feaf9e4da6f36447f78d53e3832d33880d2cc932', operation='UPDATE', pgid='pgtrigger_state_edge_421dc', table='branches', when='BEFORE')),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='branch',
            trigger=pgtrigger.compiler.Trigger(name='fence_only_grows', sql=pgtrigger.compiler.UpsertTriggerSql(condition='WHEN (NEW.fence < OLD.fence)', func="\n            RAISE EXCEPTION 'the fence of a branch only grows'\n            USING ERRCODE = 'check_violation', CONSTRAINT = 'branches_fence_only_grows', TABLE = 'branches';\n        ", hash='c0afb14b1d8140f345d63d35a0ebd9693ac25727', operation='UPDATE', pgid='pgtrigger_fence_only_grows_efcf2', table='branches', when='BEFORE')),
        ),
        migrations.AddField(
            model_name='branchlock',
            name='branch',
            field=models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='locks', to='locks.branch', verbose_name='branch'),
        ),
        migrations.AddField(
            model_name='lockevent',
            name='branch',
            field=models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='events', to='locks.branch', verbose_name='branch'),
        ),
        migrations.AddField(
            model_name='lockevent',
            name='lock',
            field=models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='events', to='locks.branchlock', verbose_name='lock'),
        ),
        migrations.AddField(
            model_name='lockwaiter',
            name='branch',
            field=models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='waiters', to='locks.branch', verbose_name='branch'),
        ),
        migrations.AddField(
            model_name='lockwaiter',
            name='lock',
            field=models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='waiters', to='locks.branchlock', verbose_name='lock'),
        ),
        migrations.AddIndex(
            model_name='branchlock',
            index=models.Index(condition=models.Q(('state', 'active')), fields=['branch', 'resource_type', 'resource_id'], name='branch_locks_held'),
        ),
        migrations.AddIndex(
            model_name='branchlock',
            index=models.Index(condition=models.Q(('auto_release_enabled', True), ('state', 'active')), fields=['expires_at'], name='branch_locks_by_expiry'),
        ),
        migrations.AddIndex(
            model_name='branchlock',
            index=models.Index(condition=models.Q(('auto_release_enabled', True), ('silent_after__isnull', False), ('state', 'active')), fields=['silent_after'], name='branch_locks_by_silence'),
        ),
        migrations.AddIndex(
            model_name='branchlock',
            index=models.Index(condition=models.Q(('lock_delay__gt', 0), ('state', 'expired')), fields=['branch', 'expired_at'], name='branch_locks_delaying'),
        ),
        migrations.AddIndex(
            model_name='branchlock',
            index=models.Index(condition=models.Q(('idempotency_key__isnull', False)), fields=['locked_by', 'idempotency_key'], name='branch_locks_by_key'),
        ),
        migrations.AddIndex(
            model_name='branchlock',
            index=models.Index(fields=['branch', '-fence'], name='branch_locks_of_branch'),
        ),
        migrations.AddConstraint(
            model_name='branchlock',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('lock_scope', 'BRANCH'), ('resource_id__isnull', True), ('resource_type__isnull', True)), models.Q(('lock_scope', 'RESOURCE_TYPE'), ('resource_id__isnull', True), ('resource_type__isnull', False)), models.Q(('lock_scope', 'RESOURCE'), ('resource_id__isnull', False), ('resource_type__isnull', False)), _connector='OR'), name='branch_locks_scope_fits'),
        ),
        migrations.AddConstraint(
            model_name='branchlock',
            constraint=models.CheckConstraint(condition=models.Q(('lock_type__in', ['INDEXING', 'MIGRATION', 'BACKUP', 'MAINTENANCE', 'MANUAL'])), name='branch_locks_type'),
        ),
        migrations.AddConstraint(
            model_name='branchlock',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('released_at__isnull', True), ('state', 'active')), models.Q(models.Q(('state', 'active'), _negated=True), ('released_at__isnull', False)), _connector='OR'), name='branch_locks_ended'),
        ),
        migrations.AddConstraint(
            model_name='branchlock',
            constraint=models.CheckConstraint(condition=models.Q(('heartbeat_interval__range', (0, 3600)), ('lock_delay__range', (0, 60)), models.Q(('reason', ''), _negated=True)), name='branch_locks_limits'),
        ),
        migrations.AddConstraint(
            model_name='branchlock',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('resource_type__isnull', True), models.Q(django.db.models.lookups.GreaterThan(django.db.models.functions.text.Length('resource_type'), 0), django.db.models.lookups.LessThanOrEqual(django.db.models.functions.text.Length('resource_type'), 100)), _connector='OR'), models.Q(('resource_id__isnull', True), models.Q(django.db.models.lookups.GreaterThan(django.db.models.functions.text.Length('resource_id'), 0), django.db.models.lookups.LessThanOrEqual(django.db.models.functions.text.Length('resource_id'), 255)), _connector='OR')), name='branch_locks_lengths'),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='branchlock',
            trigger=pgtrigger.compiler.Trigger(name='state_born', sql=pgtrigger.compiler.UpsertTriggerSql(condition='WHEN (NEW."state" NOT IN (\'active\'))', func='RAISE EXCEPTION \'a new row of branch_locks cannot be %\', NEW."state" USING ERRCODE = \'check_violation\', CONSTRAINT = \'branch_locks_state_graph\', TABLE = \'branch_locks\', COLUMN = \'state\';', hash='65de1741462f14d488ae7a36a93816d59da01da9', operation='INSERT', pgid='pgtrigger_state_born_b8aff', table='branch_locks', when='BEFORE')),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='branchlock',
            trigger=pgtrigger.compiler.Trigger(name='state_edge', sql=pgtrigger.compiler.UpsertTriggerSql(condition='WHEN (OLD."state" IS DISTINCT FROM NEW."state" AND NOT ((OLD."state" = \'active\' AND NEW."state" IN (\'expired\', \'force_released\', \'released\'))))', func='RAISE EXCEPTION \'branch_locks cannot go from % to %\', OLD."state", NEW."state" USING ERRCODE = \'check_violation\', CONSTRAINT = \'branch_locks_state_graph\', TABLE = \'branch_locks\', COLUMN = \'state\';', hash='7183d949da157a72e614ba372128ef4b19d34e90', operation='UPDATE', pgid='pgtrigger_state_edge_097e0', table='branch_locks', when='BEFORE')),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='branchlock',
            trigger=pgtrigger.compiler.Trigger(name='fence_on_grant', sql=pgtrigger.compiler.UpsertTriggerSql(declare='DECLARE asked bigint; granted bigint;', func='\n            -- A variable of its own: in RETURNING, PostgreSQL 18 reads NEW as the updated row.\n            asked := NEW.fence;\n            UPDATE branches SET fence = CASE WHEN asked > 0 THEN greatest(fence, asked) ELSE fence + 1 END\n             WHERE id = NEW.branch_id\n            RETURNING CASE WHEN asked > 0 THEN asked ELSE fence END INTO granted;\n            NEW.fence := granted;\n            RETURN NEW;\n        ', hash='6921a5b1f806a5d6d9ee3e69909e273b400e8fa1', operation='INSERT', pgid='pgtrigger_fence_on_grant_e32ec', table='branch_locks', when='BEFORE')),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='branchlock',
            trigger=pgtrigger.compiler.Trigger(name='silent_after', sql=pgtrigger.compiler.UpsertTriggerSql(declare='DECLARE silent_at timestamptz;', func='\n            IF NEW.heartbeat_interval = 0 THEN\n                NEW.silent_after := NULL;\n                RETURN NEW;\n            END IF;\n            silent_at := coalesce(NEW.last_heartbeat, NEW.locked_at)\n                + make_interval(secs => 3 * NEW.heartbeat_interval);\n            IF NEW.silent_after IS NULL OR NEW.silent_after > silent_at\n               OR NEW.silent_after < silent_at - make_interval(secs => 1.5 * NEW.heartbeat_interval) THEN\n                NEW.silent_after := silent_at;\n            END IF;\n            RETURN NEW;\n        ', hash='e33637e3c5827fbdf6aec2244368c8aa539407dd', operation='INSERT OR UPDATE', pgid='pgtrigger_silent_after_f3e25', table='branch_locks', when='BEFORE')),
        ),
        migrations.AddIndex(
            model_name='lockevent',
            index=models.Index(fields=['lock', 'id'], name='branch_lock_events_of_lock'),
        ),
        migrations.AddIndex(
            model_name='lockevent',
            index=models.Index(condition=models.Q(('kind', 'CONFLICT')), fields=['created_at'], name='branch_lock_events_conflicts'),
        ),
        migrations.AddIndex(
            model_name='lockevent',
            index=models.Index(condition=models.Q(('kind', 'HEARTBEAT')), fields=['lock', '-id'], name='branch_lock_events_beats'),
        ),
        migrations.AddIndex(
            model_name='lockevent',
            index=models.Index(condition=models.Q(('kind', 'HEARTBEAT'), _negated=True), fields=['branch', '-id'], name='branch_lock_events_of_branch'),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='lockevent',
            trigger=pgtrigger.compiler.Trigger(name='branch_lock_events_no_change', sql=pgtrigger.compiler.UpsertTriggerSql(func="RAISE EXCEPTION '% of branch_lock_events refused: it is append-only', TG_OP USING ERRCODE = 'check_violation', CONSTRAINT = 'branch_lock_events_append_only', TABLE = 'branch_lock_events';", hash='42b676b916033427047a08ddbc2409dec509d0dc', level='STATEMENT', operation='UPDATE OR TRUNCATE', pgid='pgtrigger_branch_lock_events_no_change_a51aa', table='branch_lock_events', when='BEFORE')),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='lockevent',
            trigger=pgtrigger.compiler.Trigger(name='branch_lock_events_no_delete', sql=pgtrigger.compiler.UpsertTriggerSql(func="\n                IF current_setting('signalbox.purging', true) = 'on' OR (OLD.kind = 'HEARTBEAT' AND 100 <= (\n    SELECT count(*) FROM (\n        SELECT 1 FROM branch_lock_events AS younger\n         WHERE younger.lock_id = OLD.lock_id AND younger.kind = 'HEARTBEAT' AND younger.id > OLD.id LIMIT 100\n    ) AS kept)) THEN RETURN OLD; END IF;\n                RAISE EXCEPTION '% of branch_lock_events refused: it is append-only', TG_OP USING ERRCODE = 'check_violation', CONSTRAINT = 'branch_lock_events_append_only', TABLE = 'branch_lock_events';\n            ", hash='b3577dde845c1c950234dcdd6640498fc2b97ed9', operation='DELETE', pgid='pgtrigger_branch_lock_events_no_delete_6ddc6', table='branch_lock_events', when='BEFORE')),
        ),
        migrations.AddIndex(
            model_name='lockwaiter',
            index=models.Index(condition=models.Q(('state', 'waiting')), fields=['branch', 'id'], name='branch_lock_waiters_queue'),
        ),
        migrations.AddIndex(
            model_name='lockwaiter',
            index=models.Index(condition=models.Q(('lock__isnull', False)), fields=['lock'], name='branch_lock_waiters_of_lock'),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='lockwaiter',
            trigger=pgtrigger.compiler.Trigger(name='state_born', sql=pgtrigger.compiler.UpsertTriggerSql(condition='WHEN (NEW."state" NOT IN (\'waiting\'))', func='RAISE EXCEPTION \'a new row of branch_lock_waiters cannot be %\', NEW."state" USING ERRCODE = \'check_violation\', CONSTRAINT = \'branch_lock_waiters_state_graph\', TABLE = \'branch_lock_waiters\', COLUMN = \'state\';', hash='445a525e342a82712b9ba9cb5b205e2b76226ef3', operation='INSERT', pgid='pgtrigger_state_born_82e44', table='branch_lock_waiters', when='BEFORE')),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='lockwaiter',
            trigger=pgtrigger.compiler.Trigger(name='state_edge', sql=pgtrigger.compiler.UpsertTriggerSql(condition='WHEN (OLD."state" IS DISTINCT FROM NEW."state" AND NOT ((OLD."state" = \'waiting\' AND NEW."state" IN (\'gone\', \'granted\', \'timed_out\')) OR (OLD."state" = \'granted\' AND NEW."state" IN (\'gone\'))))', func='RAISE EXCEPTION \'branch_lock_waiters cannot go from % to %\', OLD."state", NEW."state" USING ERRCODE = \'check_violation\', CONSTRAINT = \'branch_lock_waiters_state_graph\', TABLE = \'branch_lock_waiters\', COLUMN = \'state\';', hash='44d07b24de4eeb3476ea01d5184a34f57d41134f', operation='UPDATE', pgid='pgtrigger_state_edge_7e007', table='branch_lock_waiters', when='BEFORE')),
        ),
        migrations.RunSQL(EXCLUSIVE, NOT_EXCLUSIVE),
    ]
