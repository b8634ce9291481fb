"""The structure of a rank's state dict: its table, signature, differences, and the message that carries a table."""

from robust_dcp.plan.structure.attributes import Attributes, attributes_of, encode_attributes
from robust_dcp.plan.structure.diff import StructureDiff, diff_tables, merge_diffs
from robust_dcp.plan.structure.message import StructureMessage, TableDecoder
from robust_dcp.plan.structure.paths import Path, Paths
from robust_dcp.plan.structure.signature import PlanContext, StructureSignature
from robust_dcp.plan.structure.table import (
    Form,
    ItemKind,
    ItemStructure,
    Replica,
    StructureTable,
    sorted_places,
    table_of,
)

__all__ = [
    "Attributes",
    "Form",
    "ItemKind",
    "ItemStructure",
    "Path",
    "Paths",
    "PlanContext",
    "Replica",
    "StructureDiff",
    "StructureMessage",
    "StructureSignature",
    "StructureTable",
    "TableDecoder",
    "attributes_of",
    "diff_tables",
    "encode_attributes",
    "merge_diffs",
    "sorted_places",
    "table_of",
]
