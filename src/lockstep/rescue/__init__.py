"""Convert old multi-GPU files to single-device files.

The public functions are `lockstep.inspect`, `lockstep.rescue` and
`lockstep.load_weights`. They stand in `api.py`. The steps:

    detect    detect.py                    the kind of the file
    read      read.py, hdf5.py             its configs and arrays
    unwrap    unwrap.py                    the single model inside the parallel one
    rebuild   rebuild.py, old_layers.py    that model in Keras 3, without weights
    match     match.py, weight_tree.py     the array for each variable
    write     write.py, training_state.py  the new file, read back and compared
    check     check.py                     masks, settings, arrays and outputs
    report    rescue_report.py             the findings and the table of weights
"""
