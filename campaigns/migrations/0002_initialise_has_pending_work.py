from io import StringIO

from django.core.management import call_command
from django.db import migrations


def initialise(apps, schema_editor):
    """Rows older than the triggers. The command holds the predicate's one and only text; it reads ids alone."""
    if apps.get_model("campaigns", "Sequence").objects.exists():
        call_command("backfill_has_pending_work", stdout=StringIO(), stderr=StringIO())


class Migration(migrations.Migration):
    dependencies = [("campaigns", "0001_initial")]
    operations = [migrations.RunPython(initialise, migrations.RunPython.noop)]
