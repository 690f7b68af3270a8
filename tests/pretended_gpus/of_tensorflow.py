"""TensorFlow's logical CPU devices under the names of GPUs.

A sum by NCCL is a collective that waits for every device, that TensorFlow leaves out on a device
where nothing needs its result, and that takes tensors of one type alone: so a step that would hang
on GPUs hangs here.
"""

import itertools
import re
from types import SimpleNamespace

from tests.pretended_gpus.visible import numbers_of_visible

OF_NCCL = {"float16", "float32", "float64", "int32", "int64"}
"""The types that TensorFlow has a kernel of NCCL for: tensorflow/core/kernels/nccl_ops.cc."""


def _there(name):
    """The name of a pretended GPU, as that of the CPU device which stands for it."""
    return re.sub(r"(?i)\bgpu:", "CPU:", name) if isinstance(name, str) else name


def _make_devices():
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in numbers_of_visible() or [0]]
    tf.config.set_logical_device_configuration(cpu, parts)
    tf.config.threading.set_inter_op_parallelism_threads(16)  # collectives wait in threads


def _name_devices():
    import tensorflow as tf
    from tensorflow.python.ops import nccl_ops

    from lockstep.engines.tensorflow import devices

    def logical(kind):
        count = len(numbers_of_visible()) if kind == "GPU" else 1
        names = [f"/device:{kind}:{number}" for number in range(count)]
        return [SimpleNamespace(device_type=kind, name=name) for name in names]

    devices._logical = logical

    plain, mirrored = tf.device, tf.distribute.MirroredStrategy
    tf.device = lambda name: plain(_there(name))

    def strategy(names, cross_device_ops=None):
        return mirrored([*map(_there, names)], cross_device_ops=cross_device_ops)

    tf.distribute.MirroredStrategy = strategy
    nccl_ops.all_sum = _all_sum(plain)


def _all_sum(device):
    groups, instances = {}, itertools.count(5000)

    def all_sum(tensors):
        from tensorflow.python.ops import collective_ops

        types = {tensor.dtype.name for tensor in tensors}
        if len(types) > 1 or not types <= OF_NCCL:
            raise TypeError(f"NCCL sums tensors of one of {sorted(OF_NCCL)}, and not of {types}")
        names = tuple(tensor.device for tensor in tensors)
        assert all(names), names
        assert len({*names}) == len(names), names
        group, instance = groups.setdefault(names, 1000 + len(groups)), next(instances)
        sums = []
        for tensor in tensors:
            with device(tensor.device):
                sums.append(
                    collective_ops.all_reduce(tensor, len(names), group, instance, "Add", "Id")
                )
        return sums

    return all_sum


def _name_of_variables():
    from lockstep.engines.tensorflow.exchange import mirrored_variables as module

    short = module.short_name
    module.short_name = lambda device: short(device).replace("cpu:", "gpu:")


def _devices_of_operations():
    from lockstep.engines.tensorflow.branches.op_devices import OpDevices

    found = OpDevices._device
    OpDevices._device = lambda self, op: _there(found(self, op))


AFTER = {
    "tensorflow": _make_devices,
    "lockstep.engines.tensorflow.devices": _name_devices,
    "lockstep.engines.tensorflow.exchange.mirrored_variables": _name_of_variables,
    "lockstep.engines.tensorflow.branches.op_devices": _devices_of_operations,
}
