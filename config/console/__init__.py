"""The admin: site, sidebar, dashboard, badges, timelines, confirmed actions. Apps import from here only."""

from config.console.actions import ReasonForm, can_become, confirmed_action
from config.console.audit import record_human_action
from config.console.badges import TONES, badge, pill
from config.console.base import ConsoleAdmin, Entry, EstimatingPaginator, list_url, moment
from config.console.charts import columns, sparkline, stacked
from config.console.forms import RefusableForm, ServiceAdmin, StorableJSON
from config.console.liveness import Owner, owner
from config.console.panels import Figure, Panel, Row, counts_text, dashboard, few, panel
from config.console.site import navigation, urls

__all__ = [
    "TONES",
    "ConsoleAdmin",
    "Entry",
    "EstimatingPaginator",
    "Figure",
    "Owner",
    "Panel",
    "ReasonForm",
    "RefusableForm",
    "Row",
    "ServiceAdmin",
    "StorableJSON",
    "badge",
    "can_become",
    "columns",
    "confirmed_action",
    "counts_text",
    "dashboard",
    "few",
    "list_url",
    "moment",
    "navigation",
    "owner",
    "panel",
    "pill",
    "record_human_action",
    "sparkline",
    "stacked",
    "urls",
]
