import factory

from devices.models import PC


class PCFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = PC

    pc_number = factory.Sequence(lambda n: f"PC-{n + 10:04}")

    @classmethod
    def _create(cls, model_class, *args, online_since=None, **kwargs):
        pc = super()._create(model_class, *args, **kwargs)
        if online_since:
            pc.come_online()
            pc.last_heartbeat_at = online_since
            pc.save(update_fields=["status", "last_heartbeat_at"])
        return pc
