"""Preset models, described without their code."""

from __future__ import annotations

import dataclasses

from shardwise.description.model import ModelDescription
from shardwise.description.workload import Workload
from shardwise.planning.plan import Plan
from shardwise.predict.describe import traced_preset


def describe_preset(name: str, workload: Workload, plan: Plan | None = None) -> ModelDescription:
    model = traced_preset(name, workload.sequence)
    _, described = model.at(plan or Plan.of("zero3"), workload)
    return dataclasses.replace(described, outline=model.model)
