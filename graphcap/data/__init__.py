"""Text → documents → rows of a bucket → arrays. Imports errors only, of graphcap; loads no torch at import time."""

from graphcap.data.conversations import Documents, Origin, load_documents, prompt_of, read_conversations
from graphcap.data.documents import Document, DocumentList, DocumentsById
from graphcap.data.forms import Conversation
from graphcap.data.loader import RowArrays, arrange, arrange_with
from graphcap.data.packing import Row, Schedule, Update, anchor_candidates, choose_anchors, num_anchors_of
from graphcap.data.planner import Bucket, Shapes, plan
from graphcap.data.reading import Means
from graphcap.data.sample import PLAIN_MARKS, TERMINAL_MARKS, supervised_text
from graphcap.data.templates import tokenize_conversation

__all__ = [
    "Bucket",
    "Conversation",
    "Document",
    "DocumentList",
    "Documents",
    "DocumentsById",
    "Means",
    "Origin",
    "PLAIN_MARKS",
    "Row",
    "RowArrays",
    "Schedule",
    "Shapes",
    "TERMINAL_MARKS",
    "Update",
    "anchor_candidates",
    "arrange",
    "arrange_with",
    "choose_anchors",
    "load_documents",
    "num_anchors_of",
    "plan",
    "prompt_of",
    "read_conversations",
    "supervised_text",
    "tokenize_conversation",
]
