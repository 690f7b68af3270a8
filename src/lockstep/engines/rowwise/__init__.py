"""Decides whether layers, losses and metrics work row by row on a batch.

An engine with a copy of the model on each device splits a layer only if each row of its
outputs depends on the same row of its inputs alone. Keras's own layers are known
(`known_layers.py`). A user's layer is followed (`follower.py`): its `call` runs on symbolic
tensors (`followed_tensors.py`), and each of them carries how its first dim relates to the rows
of the batch. Every operation of `keras.ops` has a rule (`rules.py`), and code without a rule is
refused. Several runs have to give one program (`judging.py`). The caller then runs such a layer
on the whole batch.
"""

from lockstep.engines.rowwise.follower import UPDATES_METRIC as UPDATES_METRIC
from lockstep.engines.rowwise.follower import Scratch as Scratch
from lockstep.engines.rowwise.follower import is_following as is_following
from lockstep.engines.rowwise.judging import LOOKS_AT_ROWS as LOOKS_AT_ROWS
from lockstep.engines.rowwise.judging import call_refused as call_refused
from lockstep.engines.rowwise.judging import function_refused as function_refused
from lockstep.engines.rowwise.judging import refused as refused
from lockstep.engines.rowwise.known_layers import arrays_in as arrays_in
from lockstep.engines.rowwise.known_layers import call_name as call_name
from lockstep.engines.rowwise.known_layers import drawing_layers as drawing_layers
from lockstep.engines.rowwise.known_layers import is_batch_norm as is_batch_norm
from lockstep.engines.rowwise.known_layers import is_container as is_container
from lockstep.engines.rowwise.known_layers import is_declared as is_declared
from lockstep.engines.rowwise.known_layers import is_in_float8 as is_in_float8
from lockstep.engines.rowwise.known_layers import stateful_rnns as stateful_rnns
from lockstep.engines.rowwise.known_layers import (
    untouched_random_numbers as untouched_random_numbers,
)
from lockstep.engines.rowwise.known_layers import works_by_rows as works_by_rows
from lockstep.engines.rowwise.rules import RULES as RULES
from lockstep.engines.rowwise.rules import NotRowByRow as NotRowByRow
from lockstep.engines.rowwise.rules import Reasons as Reasons
