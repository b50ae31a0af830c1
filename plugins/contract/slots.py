"""Inputs of an engine for many adapters: stacks of slots, and the slot of every row.

Stacks     the binding of A [slots, k, R] and of B [slots, R, n]; R is the engine's maximum rank
lora_slot  [rows] int32, the slot of each row, or one that every row takes; -1 is the base model,
           and so is any number that is no slot: who writes it makes sure that it is one
lora_rank  [slots, sites] int32, the rank at each site of the adapter in each slot; 0 without one
Vectors    the scale and bias of a site [slots + 1, n]; the last row is the base model's
"""

LORA_SLOT, LORA_RANK = "lora_slot", "lora_rank"
SLOT_DTYPE = "int32"
BASE_SLOT = -1

# Symbolic dimensions.
SLOTS, SLOT_ROWS, SLOTS_AND_BASE = "slots", "slot_rows", "slots_and_base"
