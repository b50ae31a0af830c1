"""Fruit: what structured answers are, in the environments of clients that have pydantic."""

from typing import Literal

from pydantic import BaseModel


class Fruit(BaseModel):
    """A fruit."""

    name: Literal["apple", "pear", "plum"]
    is_ripe: bool
