from django.db import migrations


class Migration(migrations.Migration):
    """What Django 5.2 cannot declare: a cascade by the database, a protected state's default, room for HOT updates."""

    dependencies = [("reminders", "0001_initial")]

    operations = [
        migrations.RunSQL(
            sql=[
                "ALTER TABLE alarm ADD CONSTRAINT alarm_page_fk FOREIGN KEY (page_id) REFERENCES pages (id)"
                " ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED",
                "ALTER TABLE alarm_delivery ALTER COLUMN state SET DEFAULT 'claimed'",
                "ALTER TABLE alarm SET (fillfactor = 80)",
                "ALTER TABLE alarm_delivery SET (fillfactor = 80)",
            ],
            reverse_sql=["ALTER TABLE alarm DROP CONSTRAINT alarm_page_fk"],
        )
    ]
