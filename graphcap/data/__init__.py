"""Text → documents → rows of a bucket → arrays. Imports errors only, of graphcap; loads no torch at import time."""

from graphcap.data.conversations import Conversation, Document, Documents, load_documents, read_conversations
from graphcap.data.loader import RowArrays, arrange, arrange_with
from graphcap.data.packing import Row, Schedule, Update, anchor_candidates, choose_anchors, num_anchors_of
from graphcap.data.planner import Bucket, Shapes, plan
from graphcap.data.templates import tokenize_conversation

__all__ = [
    "Bucket",
    "Conversation",
    "Document",
    "Documents",
    "Row",
    "RowArrays",
    "Schedule",
    "Shapes",
    "Update",
    "anchor_candidates",
    "arrange",
    "arrange_with",
    "choose_anchors",
    "load_documents",
    "num_anchors_of",
    "plan",
    "read_conversations",
    "tokenize_conversation",
]
