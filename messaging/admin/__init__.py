"""The admin of messaging; importing a module registers its pages."""

from messaging.admin import charts, hooks, messages, overview, recipients, texts

__all__ = ["charts", "hooks", "messages", "overview", "recipients", "texts"]
