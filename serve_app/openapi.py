"""What `/docs` says of bodies and replies beyond what FastAPI reads from the endpoints."""

from typing import Any

from serve_app import replies, schemas

Accepts = dict[str, Any]
IMAGE_BODY: Accepts = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                        }
                    },
                }
            },
        },
    }
}
JSON_BODY: Accepts = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": schemas.EmbeddingsRequest.model_json_schema()}},
    }
}
Replies = dict[int | str, dict[str, Any]]
REPLY: Replies = {200: {"model": schemas.EmbeddingsReply}}
BINARY = {"schema": {"type": "string", "format": "binary"}}
NEGOTIATED: Replies = {
    200: {
        "model": schemas.EmbeddingsReply | schemas.PatchEmbeddingsReply,
        "description": "What `Accept` asks for. Pooled: one array, `embeddings`. Patch: `offsets` "
        "[images + 1], `grid_thw` [images, 3] and `rows` [rows of all images, width]; JSON only if "
        "it is named.",
        "content": {replies.NPY: BINARY, replies.SAFETENSORS: BINARY},
    },
    406: {"description": "None of the types in `Accept` is offered"},
}
