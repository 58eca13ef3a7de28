"""One look at a machine and a recipe: findings, tables, pictures and facts, put together in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.run import RunConfig
from paceline.costs.hardware import Hardware, find_hardware
from paceline.doctor.environment.judge import judge as judge_environment
from paceline.doctor.environment.judge import variable_table
from paceline.doctor.environment.situation import Situation
from paceline.doctor.hardware.card import Card, card_table
from paceline.doctor.hardware.host import Host, host_table, judge_host
from paceline.doctor.hardware.judge import judge as judge_cards
from paceline.doctor.software import Software, judge_software, software_table
from paceline.doctor.topology.acs import judge_acs, parse_lspci
from paceline.doctor.topology.groups import best_grouping
from paceline.doctor.topology.judge import alike, link_table, topology_table
from paceline.doctor.topology.judge import judge as judge_topology
from paceline.doctor.topology.matrix import LinkMatrix
from paceline.doctor.topology.picture import matrix_picture
from paceline.report.finding import Finding, worst_first
from paceline.report.html import section, table_html
from paceline.report.table import Table


@dataclass(kw_only=True)
class Examination:
    """Grows part by part; what was not looked at is not in it."""

    config: RunConfig | None = None
    nodes: int | None = None
    card: Hardware | None = None
    found: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    """(title, HTML)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For `--json`."""

    @property
    def findings(self) -> list[Finding]:
        return worst_first(dict.fromkeys(self.found))

    @property
    def sections(self) -> list[str]:
        """Finished parts of the page."""
        drawn = [section(title, html) for title, html in self.pictures]
        return [*drawn, *(section(shown.title or "More", table_html(shown)) for shown in self.tables)]

    def add_cards(self, cards: Sequence[Card]) -> None:
        self.card = self.card or (find_hardware(cards[0].name) if cards else None)
        self.found += judge_cards(list(cards))
        self.tables.append(card_table(list(cards)))
        self.facts["gpus"] = [asdict(card) for card in cards]

    def add_topology(self, matrices: Sequence[LinkMatrix]) -> None:
        first = matrices[0]
        self.found += alike(matrices)
        self.found += judge_topology(first, config=self.config, card=self.card, nodes=self.nodes)
        if first.gpus:
            self.tables.append(topology_table(first))
        words = f"<details><summary>As a table</summary>{table_html(link_table(first))}</details>"
        self.pictures.append(("Links", matrix_picture(first) + words))
        grouping = best_grouping(first)
        self.facts["topology"] = {
            "devices": list(first.devices),
            "links": {f"{one}-{other}": label for (one, other), label in first.links.items()},
            "network_cards": dict(first.nic_names),
            "groups": [list(group) for group in grouping.groups] if grouping else [],
            "groups_over": grouping.level_name if grouping else None,
        }

    def add_acs(self, text: str, name: str) -> None:
        self.found += judge_acs(parse_lspci(text, name))

    def add_environment(
        self,
        environ: dict[str, str],
        *,
        gpus_per_node: int | None,
        cores: int | None,
        interfaces: tuple[str, ...] | None,
    ) -> None:
        situation = Situation(
            config=self.config,
            nodes=self.nodes,
            gpus_per_node=gpus_per_node,
            card=self.card,
            cores=cores,
            interfaces=interfaces,
        )
        self.found += judge_environment(environ, situation)
        shown = variable_table(environ)
        self.tables.append(shown)
        self.facts["environment"] = {name: value for name, value, *_ in shown.rows}

    def add_software(self, software: Software, *, gpus: int) -> None:
        self.found += judge_software(software, config=self.config, gpus=gpus)
        self.tables.append(software_table(software))
        self.facts["software"] = asdict(software)

    def add_host(self, host: Host, *, gpus: int) -> None:
        self.found += judge_host(host, gpus=gpus, nodes=self.nodes)
        self.tables.append(host_table(host))
        self.facts["host"] = host.as_dict()
