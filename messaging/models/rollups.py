from django.db import models
from django.utils.translation import gettext_lazy as _


class MessageSegment(models.Model):
    """Equal tags of subscriptions, kept once; messages and figures name it by its number. Written by a trigger."""

    id = models.AutoField(primary_key=True)
    application_id = models.UUIDField()
    mark = models.CharField(max_length=32)
    tags = models.JSONField()

    class Meta:
        db_table = "message_segments"
        verbose_name = _("segment")
        verbose_name_plural = _("segments")
        constraints = [models.UniqueConstraint(fields=["application_id", "mark"], name="message_segments_once")]

    def __str__(self) -> str:
        return str(self.tags)


class MessageRollupDelta(models.Model):
    """What one statement changed in the counts of one signature; written by triggers, folded by a sweep.

    No foreign keys and no index but the key: this is written in the dispatchers' hot path.
    """

    id = models.BigAutoField(primary_key=True)
    application_id = models.UUIDField()
    hour = models.DateTimeField()
    channel_type = models.TextField()
    kind = models.TextField()
    campaign = models.TextField()
    segment = models.IntegerField(null=True)
    network_retries = models.SmallIntegerField()
    outage_retries = models.SmallIntegerField()
    rate_limited_retries = models.SmallIntegerField()
    status = models.TextField()
    sent = models.BooleanField()
    received = models.BooleanField()
    converted = models.BooleanField()
    cancelled = models.BooleanField()
    send_bucket = models.SmallIntegerField(null=True)
    receive_bucket = models.SmallIntegerField(null=True)
    convert_bucket = models.SmallIntegerField(null=True)
    total_bucket = models.SmallIntegerField(null=True)
    n = models.BigIntegerField()
    send_us = models.DecimalField(max_digits=30, decimal_places=0)
    receive_us = models.DecimalField(max_digits=30, decimal_places=0)
    convert_us = models.DecimalField(max_digits=30, decimal_places=0)
    total_us = models.DecimalField(max_digits=30, decimal_places=0)

    class Meta:
        db_table = "message_rollup_deltas"
        verbose_name = _("roll-up delta")
        verbose_name_plural = _("roll-up deltas")

    def __str__(self) -> str:
        return f"{self.hour:%Y-%m-%d %H} {self.status} {self.n:+d}"


class MessageRollup(models.Model):
    """A folded figure: `n` messages of a measure, created in the hour or (UTC) day that starts at `starts_at`.

    For a latency, `bucket` is its place in the histogram and `total` the sum in microseconds.
    """

    id = models.BigAutoField(primary_key=True)
    application_id = models.UUIDField()
    tier = models.CharField(max_length=4)
    dimension = models.CharField(max_length=8)
    starts_at = models.DateTimeField()
    key = models.TextField()
    measure = models.CharField(max_length=24)
    bucket = models.SmallIntegerField()
    n = models.BigIntegerField()
    total = models.DecimalField(max_digits=30, decimal_places=0)

    class Meta:
        db_table = "message_rollups"
        verbose_name = _("roll-up")
        verbose_name_plural = _("roll-ups")
        constraints = [
            models.UniqueConstraint(
                fields=["application_id", "tier", "dimension", "starts_at", "key", "measure", "bucket"],
                name="message_rollups_once",
            )
        ]

    def __str__(self) -> str:
        return f"{self.starts_at:%Y-%m-%d %H} {self.dimension} {self.key} {self.measure}: {self.n}"
