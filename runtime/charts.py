"""What a chart of values by step is: key, group, title, and the metrics of which it shows the past.

The charts of the core are listed in `dashboards/curves.py`. A feature lists its own in the part of the
history that it replays (`HistoryPart.CHARTS`), and says what an event adds to them (`HistoryPart.drawn`). A
line of a chart has the chart's key, or `key/label` if there are several. Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_run.watchdog.rank_metrics import Unit

Group = Literal["learning", "rollouts", "machine"]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart of the live page and of the report.

    Attributes:
        metrics: names in the catalogue of metrics whose past it shows.
        sampled: its values are not in the journal. The live page reads them from the only metric whenever a
            step is committed, so the chart begins when the server does.
    """

    key: str
    group: Group
    title: str
    unit: Unit = ""
    metrics: tuple[str, ...] = ()
    sampled: bool = False
