"""An engine of NumPy arithmetic with N devices: the proof that the interface is enough.

A device is a copy of the state and a part of the rows. Between two steps the state is outside of
the variables, which hold NaN: whoever reads them there without `sync` is found. The layers are
Dense, Activation, Dropout and BatchNormalization, with the mean squared error or the cross-entropy
of logits, and SGD with momentum.
"""

import keras
import numpy as np

from lockstep.checkpoint.data_position import recorded_type
from lockstep.core.devices import Device
from lockstep.core.engine import PREDICT, TEST, TRAIN, Engine, Home, Session, Snapshot
from lockstep.core.held_signals import HeldSignals
from lockstep.core.state import named_variables, variables_of
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import build_on_first_batch
from lockstep.training.input import HostIterator, drawn

LAYERS = (
    keras.layers.InputLayer,
    keras.layers.Dense,
    keras.layers.ReLU,
    keras.layers.Dropout,
    keras.layers.BatchNormalization,
)


class NumPyEngine(Engine):
    """Runs small models on so many devices."""

    name = "numpy"
    count = 4

    def devices(self):
        return tuple(Device(f"cpu:{number}", "NumPy") for number in range(self.count))

    def rehearse(self, devices):
        self.count = devices

    def join(self, place):
        return 0, 1

    def session(self, model, layout):
        if layout.is_sharded:
            raise self._without_shards()
        for layer in model.layers:
            if not isinstance(layer, LAYERS):
                raise UnsupportedModel(f"{layer.name!r} is no layer that NumPy has.")
        return NumPySession(model, layout)

    def probe(self, model):
        raise NotImplementedError


class NumPySession(Session):
    """One model whose state is in its variables, or in an epoch."""

    running = None

    def open(self):
        pass

    def close(self):
        pass

    def home(self, variable):
        return Home(self.devices)

    def step_function(self, kind, force):
        known = getattr(self.model, kind.function)
        if known is not None and not force:
            return known

        def run(*args):
            raise NotImplementedError("Keras's own loops hand over the state of a framework.")

        run.__module__ = "lockstep.numpy"  # made by an engine
        return run

    def batches(self, kind, *, recorded=False, **data):
        return (recorded_type(kind, HostIterator) if recorded else HostIterator)(**data)

    def build(self, batches, kind):
        if kind is not PREDICT:
            build_on_first_batch(self.model, batches)
        batches.reset()

    def epoch(self, kind, batches, callbacks):
        return Epoch(self, kind)

    def sync(self):
        if self.running is not None:
            self.running.put_back()

    def snapshot(self, logs, *, writes):
        named = named_variables(self.model)
        state = {} if self.running is None else self.running.state
        found = {n: np.array(state.get(id(v), v.value)) for n, v in named.items()}
        found |= {f"logs/{name}": np.asarray(value) for name, value in dict.items(logs)}
        arrays = [(name, str(each.dtype), each.shape) for name, each in found.items()]
        return Snapshot(len(named), arrays, iter(found.values()))

    def is_compiled(self):
        return False


class Epoch(HeldSignals):
    """Steps on the devices, with the state out of the variables."""

    def __init__(self, session, kind):
        super().__init__()
        self.session, self.model, self.kind = session, session.model, kind
        self.count = len(session.devices)
        self.state = {}  # by the `id` of a variable; empty while the variables have it

    def may_interrupt(self):
        return True

    def finish(self, error):
        self.put_back()
        self.session.running = None

    def begin(self):
        self.session.running = self
        return self.step

    def take_out(self):
        variables = variables_of(self.model)
        state = {id(v): np.array(v.value) for v in variables}
        self.state = state  # before the variables are emptied
        for variable in variables:
            if "float" in variable.dtype:
                variable.assign(np.full(variable.shape, np.nan, variable.dtype))

    def put_back(self):
        for variable in variables_of(self.model):
            if id(variable) in self.state:
                variable.assign(self.state[id(variable)])
        self.state = {}

    def step(self, iterator, times):
        self.kind.function_of(self.model)
        outputs = []
        for batch in drawn(iterator, times):
            if not self.state:
                self.take_out()
            data = keras.utils.unpack_x_y_sample_weight(batch)
            run = {TRAIN: self.train, TEST: self.test, PREDICT: self.predict}[self.kind]
            output, self.state = run(*map(_array, data))  # the state before it, or after it
            outputs.append(output)
        return np.concatenate(outputs) if self.kind is PREDICT else outputs[-1]

    # ------------------------------------------------------------ kinds of steps

    def predict(self, x, y=None, weight=None):
        parts = [self.forward(rows, self.state)[0] for rows in self.split(x)]
        return np.concatenate(parts), self.state

    def test(self, x, y, weight):
        outputs, _ = self.predict(x)
        values, _ = self.loss(outputs, y, weight, len(x))
        return self.logs(values.sum(), len(x), outputs, y, dict(self.state))

    def train(self, x, y, weight):
        state = dict(self.state)
        outputs, back = self.forward_together(self.split(x), state)
        every = zip(outputs, self.split(y), self.split(weight), strict=True)
        found = [self.loss(*each, len(x)) for each in every]
        gradients = back([slope for _, slope in found])
        optimizer = self.model.optimizer
        rate = float(state[id(optimizer.learning_rate)])
        for variable in self.model.trainable_variables:
            slot = optimizer.momentums[optimizer._get_variable_index(variable)]
            moved = optimizer.momentum * state[id(slot)] - rate * gradients[id(variable)]
            state[id(slot)] = moved.astype(variable.dtype)
            state[id(variable)] = (state[id(variable)] + moved).astype(variable.dtype)
        state[id(optimizer.iterations)] = state[id(optimizer.iterations)] + 1
        loss = sum(values.sum() for values, _ in found)
        return self.logs(loss, len(x), np.concatenate(outputs), y, state)

    def logs(self, loss, rows, outputs, y, state):
        """Update the loss tracker and the metrics of Keras, which compute on their variables."""
        model = self.model
        mine = {id(v) for metric in model.metrics for v in metric.variables}
        for metric in model.metrics:
            for variable in metric.variables:
                variable.assign(state[id(variable)])
        model.metrics[0].update_state(loss, sample_weight=rows)
        found = {k: np.asarray(v) for k, v in model.compute_metrics(None, y, outputs).items()}
        for metric in model.metrics:
            for variable in metric.variables:
                state[id(variable)] = np.array(variable.value)
        return found, {
            key: np.array(value) if key in mine else value for key, value in state.items()
        }

    def split(self, rows):
        """Return the rows of each device."""
        return [None] * self.count if rows is None else np.array_split(rows, self.count)

    # ------------------------------------------------------------ arithmetic

    def loss(self, outputs, y, weight, rows):
        """Return the loss of each row of a device over all rows, and its gradient."""
        weight = np.ones(len(outputs)) if weight is None else weight
        if self.model.loss == "mse":
            far = outputs - y
            values = (far**2).mean(-1) * weight / rows
            return values, 2 * far * weight[:, None] / far.shape[-1] / rows
        raised = np.exp(outputs - outputs.max(-1, keepdims=True))
        shares = raised / raised.sum(-1, keepdims=True)
        hot = np.eye(outputs.shape[-1])[y.astype(int).reshape(-1)]
        values = -np.log((shares * hot).sum(-1)) * weight / rows
        return values, (shares - hot) * weight[:, None] / rows

    def forward(self, x, state):
        """Return the outputs of one device in inference."""
        for layer in self.model.layers:
            if isinstance(layer, keras.layers.Dense):
                x = x @ state[id(layer.kernel)] + state[id(layer.bias)]
            elif isinstance(layer, keras.layers.ReLU):
                x = np.maximum(x, 0)
            elif isinstance(layer, keras.layers.BatchNormalization):
                mean, var = state[id(layer.moving_mean)], state[id(layer.moving_variance)]
                x = (x - mean) / np.sqrt(var + layer.epsilon)
                x = x * state[id(layer.gamma)] + state[id(layer.beta)]
        return x, state

    def forward_together(self, xs, state):
        """Return the outputs of all devices in training, and what computes the gradients.

        Devices meet where a layer needs the sum over all rows, and where gradients are summed.
        """
        steps = []
        for layer in self.model.layers:
            if isinstance(layer, keras.layers.Dense):
                xs, back = _dense(layer, xs, state)
            elif isinstance(layer, keras.layers.ReLU):
                xs, back = _relu(xs)
            elif isinstance(layer, keras.layers.Dropout):
                xs, back = _dropout(layer, xs, state)
            elif isinstance(layer, keras.layers.BatchNormalization):
                xs, back = _batch_norm(layer, xs, state)
            else:
                continue
            steps.append(back)

        def gradients(slopes):
            found = {}
            for back in reversed(steps):
                slopes = back(slopes, found)
            return found

        return xs, gradients


def _dense(layer, xs, state):
    kernel, bias = state[id(layer.kernel)], state[id(layer.bias)]

    def back(slopes, found):
        found[id(layer.kernel)] = sum(x.T @ s for x, s in zip(xs, slopes, strict=True))
        found[id(layer.bias)] = sum(s.sum(0) for s in slopes)
        return [s @ kernel.T for s in slopes]

    return [x @ kernel + bias for x in xs], back


def _relu(xs):
    return [np.maximum(x, 0) for x in xs], lambda slopes, found: [
        s * (x > 0) for x, s in zip(xs, slopes, strict=True)
    ]


def _dropout(layer, xs, state):
    """Draw for the rows of all devices, as one device does."""
    seed = layer.seed_generator.state
    drawing = keras.random.SeedGenerator(0)
    drawing.state.assign(state[id(seed)])
    shape = (sum(map(len, xs)), *xs[0].shape[1:])
    kept = np.asarray(keras.random.dropout(np.ones(shape, "float32"), layer.rate, seed=drawing))
    state[id(seed)] = np.array(drawing.state.value)
    masks = np.split(kept, np.cumsum(list(map(len, xs)))[:-1])

    def times(values, found=None):
        return [value * mask for value, mask in zip(values, masks, strict=True)]

    return times(xs), times


def _batch_norm(layer, xs, state):
    rows = sum(map(len, xs))
    mean = sum(x.sum(0) for x in xs) / rows
    var = sum(((x - mean) ** 2).sum(0) for x in xs) / rows
    for variable, now in ((layer.moving_mean, mean), (layer.moving_variance, var)):
        before = state[id(variable)]
        state[id(variable)] = before * layer.momentum + now * (1 - layer.momentum)
    gamma, scale = state[id(layer.gamma)], 1 / np.sqrt(var + layer.epsilon)
    normal = [(x - mean) * scale for x in xs]

    def back(slopes, found):
        pairs = list(zip(slopes, normal, strict=True))
        found[id(layer.beta)] = sum(s.sum(0) for s in slopes)
        found[id(layer.gamma)] = sum((s * n).sum(0) for s, n in pairs)
        means = found[id(layer.beta)] / rows, found[id(layer.gamma)] / rows
        return [gamma * scale * (s - means[0] - n * means[1]) for s, n in pairs]

    return [n * gamma + state[id(layer.beta)] for n in normal], back


def _array(leaf):
    return None if leaf is None else np.asarray(leaf)
