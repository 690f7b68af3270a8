"""The cases of every test run on TensorFlow, each with a number of devices."""

SAMPLE = {
    "cnn, sgd": 2,
    "several inputs and outputs, sgd": 3,
    "subclassed, sgd": 4,
    "masked lstm, sgd": 3,
    "added losses, sgd": 2,
    "embedding mask and temporal weights": 4,
    "scalar custom loss (Dice)": 2,
    "in-batch contrastive loss": 4,
    "batch norm": 4,
    "flipped batch": 3,
    "reshape with the batch size in it": 2,
    "gradient accumulation over 3 steps": 4,
    "mixed_float16, loss scaled": 2,
    "run_eagerly=True": 2,
}
