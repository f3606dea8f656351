"""/docs: /openapi.json as one readable page, without scripts or external resources."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

router = APIRouter()
STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{font-size:.9em}"
    "table{border-collapse:collapse}td{border-top:1px solid #ccc;padding:.2em .8em .2em 0;vertical-align:top}"
)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The routes and their fields."""
    return HTMLResponse(page(request.app.openapi()), headers=HEADERS)


def page(document: dict[str, Any]) -> str:
    """The page for an OpenAPI document."""
    title = f"{document['info']['title']} {document['info']['version']}"
    schemas = document.get("components", {}).get("schemas", {})
    parts = [f"<h1>{html.escape(title)}</h1><p>For programs: <a href='openapi.json'>openapi.json</a></p>"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(f"{method.upper()} {path}", operation, schemas)
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}{''.join(parts)}</html>"


def _operation(name: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{html.escape(name)}</code></h2><p>{html.escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        schema = schemas[body["$ref"].rpartition("/")[2]]
        required = schema.get("required", ())
        rows = [_field(name, field, name in required) for name, field in schema["properties"].items()]
        yield f"<table>{''.join(rows)}</table>"


def _field(name: str, schema: dict[str, Any], is_required: bool) -> str:
    first = f"<code>{html.escape(name)}</code>{' (required)' if is_required else ''}"
    cells = first, html.escape(kind(schema)), html.escape(_about(schema))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def kind(schema: dict[str, Any]) -> str:
    """A type in words, such as `integer or null`."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(kind, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


def _about(schema: dict[str, Any]) -> str:
    limits = [f"at least {schema['minimum']}"] if "minimum" in schema else []
    limits += [f"at most {schema['maximum']}"] if "maximum" in schema else []
    return "; ".join([*filter(None, [schema.get("description")]), *limits])
