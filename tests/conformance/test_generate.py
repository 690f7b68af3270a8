"""`generate` of a model that has the hooks of KerasHub's language models."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops, random

import lockstep

WORDS, WIDTH, LENGTH, BEAMS = 64, 256, 10, 3


class Sampler:
    """Chooses the next words; its variables belong to no model."""

    def __init__(self, name):
        self.choose = getattr(self, name)
        self.seeds = random.SeedGenerator(3)
        self.variables = [self.seeds.state]

    def greedy(self, logits):
        return ops.argmax(logits, -1)

    def top_k(self, logits):
        values, words = ops.top_k(logits, 5)
        chosen = random.categorical(values, 1, seed=self.seeds)
        return ops.take_along_axis(words, chosen, -1)[:, 0]

    def top_p(self, logits):
        words = ops.argsort(-logits, -1)
        shares = ops.take_along_axis(ops.softmax(logits), words, -1)
        rest = ops.where(ops.cumsum(shares, -1) - shares < 0.9, ops.log(shares), -1e9)
        chosen = random.categorical(rest, 1, seed=self.seeds)
        return ops.take_along_axis(words, chosen, -1)[:, 0]


class Writer(keras.Model):
    """Generates as `keras_hub.models.CausalLM` does."""

    def __init__(self, sampler):
        super().__init__()
        self.sampler, self.beams = Sampler(sampler), 1
        self.embedding = layers.Embedding(WORDS, WIDTH, embeddings_initializer="normal")
        self.hidden, self.logits = layers.Dense(WIDTH, "tanh"), layers.Dense(WORDS)
        self.generate_function = self.program = self.given = None

    def call(self, words, seen=LENGTH):
        position = ops.arange(LENGTH)
        read = ops.where(position < seen, 0.9 ** ops.abs(seen - position), 0.0)
        summed = ops.sum(self.embedding(words) * ops.cast(read, "float32")[:, None], 1)
        return 30 * self.logits(self.hidden(summed))

    def generate_step(self, inputs, stop):
        words, given = inputs["token_ids"], inputs["padding_mask"]
        state = self.sampler.seeds.state

        def goes_on(words, index, _):
            written = ops.arange(LENGTH) < index
            stops = ops.isin(words, stop or [-1]) & written & (given == 0)
            return (index < LENGTH) & ~ops.all(ops.any(stops, -1))

        def write(words, index, seed):
            logits = self(words, index)
            with keras.StatelessScope([(state, seed)]) as scope:
                chosen = self.sampler.choose(logits)
            seed = scope.get_current_value(state)
            here = ops.arange(LENGTH) == index
            new = ops.cast(chosen, words.dtype)[:, None]
            return ops.where(here & (given == 0), new, words), index + 1, seed

        start = ops.min(ops.sum(given, -1))
        words, _, seed = ops.while_loop(goes_on, write, (words, start, state.value))
        state.assign(seed)
        return {"token_ids": words}

    def make_generate_function(self):
        if self.generate_function is not None:
            return self.generate_function

        def program(inputs, stop, state):
            variables = [*self.sampler.variables, *self.variables]
            with keras.StatelessScope(list(zip(variables, state, strict=True))) as scope:
                outputs = self.generate_step(inputs, stop)
            return outputs, [scope.get_current_value(v) for v in self.sampler.variables]

        self.program = jax.jit(program, static_argnums=1)

        def generate_function(inputs, stop_token_ids=None):
            given = inputs, stop_token_ids, self.state()
            vars(self)["given"] = given  # Keras would track the dict
            outputs, after = self.program(*given)
            for variable, value in zip(self.sampler.variables, after, strict=True):
                variable.assign(value)
            return outputs

        self.generate_function = generate_function
        return generate_function

    def state(self):
        return [v.value for v in (*self.sampler.variables, *self.variables)]

    def generate(self, inputs, stop_token_ids=None):
        return self.make_generate_function()(inputs, stop_token_ids=stop_token_ids)["token_ids"]


class WriterOfBeams(Writer):
    """Follows the likeliest texts side by side."""

    def generate_step(self, inputs, stop):
        words, given = (ops.repeat(inputs[key], BEAMS, 0) for key in ("token_ids", "padding_mask"))
        rows = inputs["token_ids"].shape[0]
        scores = ops.tile(ops.convert_to_tensor([[0.0, -1e9, -1e9]]), (rows, 1))

        def write(words, index, scores):
            values = ops.log_softmax(self(words, index))
            values = ops.reshape(values, (rows, BEAMS, WORDS)) + scores[..., None]
            best, place = ops.top_k(ops.reshape(values, (rows, -1)), BEAMS)
            texts = ops.reshape(words, (rows, BEAMS, LENGTH))
            texts = ops.take_along_axis(texts, place[..., None] // WORDS, 1)
            texts = ops.reshape(texts, (-1, LENGTH))
            new = ops.cast(ops.reshape(place % WORDS, (-1, 1)), words.dtype)
            here = ops.arange(LENGTH) == index
            return ops.where(here & (given == 0), new, texts), index + 1, best

        start = ops.min(ops.sum(given, -1))
        found = ops.while_loop(
            lambda words, index, _: index < LENGTH, write, (words, start, scores)
        )
        return {"token_ids": ops.reshape(found[0], (rows, BEAMS, LENGTH))[:, 0]}


def writer(sampler, **options):
    keras.utils.set_random_seed(5)
    made = WriterOfBeams("greedy") if sampler == "beam" else Writer(sampler)
    made(np.zeros((1, LENGTH), "int32"))
    return lockstep.distribute(made, 4, **options) if options else made


def prompts(rows):
    rng = np.random.default_rng(rows)
    given = np.arange(LENGTH) < 2 + np.arange(rows)[:, None] % 3
    words = np.where(given, rng.integers(1, WORDS, (rows, LENGTH)), 0)
    return {"token_ids": words.astype("int32"), "padding_mask": given.astype("int32")}


def texts(made, rows=8):
    """Two calls, as a sampler goes on, and one with words that end a text."""
    stop = (1, 2, 3, 4, 5, 6, 7, 8)
    return [np.asarray(made.generate(prompts(rows), each)) for each in (None, None, stop)]


@pytest.mark.parametrize("state", ["replicated", "sharded"])
@pytest.mark.parametrize("sampler", ["greedy", "top_k", "top_p", "beam"])
def test_each_device_writes_the_texts_of_its_prompts(sampler, state):
    one, many = writer(sampler), writer(sampler, state=state)
    np.testing.assert_array_equal(texts(many), texts(one))
    last, by_rows = one.generate(prompts(8)), many.generate(prompts(8))
    np.testing.assert_array_equal(by_rows, last)
    assert by_rows.sharding.shard_shape((8, LENGTH)) == (2, LENGTH)
    whole, split = (
        each.program.lower(*each.given).compile().cost_analysis()["flops"] for each in (one, many)
    )
    assert split < 0.3 * whole
    for rows in (7, 1):
        last, whole = one.generate(prompts(rows)), many.generate(prompts(rows))
        np.testing.assert_array_equal(whole, last)
        assert whole.sharding.is_fully_replicated


def test_the_sampler_of_one_device_goes_on_after_release():
    one, many = writer("top_k"), writer("top_k", state="replicated")
    found = texts(many)
    lockstep.release(many)
    np.testing.assert_array_equal([*found, *texts(many)], [*texts(one), *texts(one)])


def test_numbers_that_depend_on_the_layout_are_not_split():
    with jax.threefry_partitionable(False):
        one, many = writer("top_k"), writer("top_k", state="replicated")
        np.testing.assert_array_equal(texts(many), texts(one))
        assert many.generate(prompts(8)).sharding.is_fully_replicated
