"""The part of SARIF 2.1.0's schema that `cupyflash.sim.formats` writes, as JSON Schema.

Written from the specification (OASIS, SARIF 2.1.0, section 3): each property that we use, with its type, its allowed values and
what is required. As in OASIS's own schema, objects have no other properties. No package on PyPI has that schema: logs of all tests
were held against it by hand (oasis-tcs/sarif-spec, sarif-2.1/schema/sarif-schema-2.1.0.json), which found nothing else.
"""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {"type": "string"}


def record(*required: str, **properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with these properties and no others."""
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def several(items: dict[str, Any], unique: bool = True) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": unique}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def whole(least: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least}


MESSAGE = record("text", text=TEXT)
PHYSICAL = record(
    "artifactLocation",  # or an address, which we do not write
    artifactLocation=record(uri=TEXT | {"format": "uri-reference"}, uriBaseId=TEXT),
    region=record("startLine", startLine=whole(1)),  # or an offset
)
LOCATION = record(
    id=whole(-1),
    physicalLocation=PHYSICAL,
    logicalLocations=several(record(fullyQualifiedName=TEXT, kind=TEXT)),
    message=MESSAGE,
)
RESULT = record(
    "message",
    ruleId=TEXT,
    ruleIndex=whole(-1),
    level=one_of("none", "note", "warning", "error"),
    message=MESSAGE,
    locations=several(LOCATION, unique=False),
    relatedLocations=several(LOCATION),
    partialFingerprints={"type": "object", "additionalProperties": TEXT},
    suppressions=several(record("kind", kind=one_of("inSource", "external"), justification=TEXT, location=LOCATION)),
)
RULES = several(record("id", id=TEXT, shortDescription=MESSAGE))
RUN = record(
    "tool",
    tool=record("driver", driver=record("name", name=TEXT, version=TEXT, rules=RULES)),
    columnKind=one_of("utf16CodeUnits", "unicodeCodePoints"),
    results=several(RESULT, unique=False),
)
LOG = record("version", "runs", version=one_of("2.1.0"), runs=several(RUN, unique=False)) | {
    "$schema": "http://json-schema.org/draft-07/schema#"
}
LOG["properties"]["$schema"] = TEXT
