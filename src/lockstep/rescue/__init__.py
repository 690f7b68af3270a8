"""Convert old multi-GPU files to single-device files.

The public functions are `lockstep.inspect`, `lockstep.rescue` and
`lockstep.load_weights`, in `api.py`. The steps of a rescue, and their files:

    detect    detect.py, hdf5.py           the kind of the file
    read      keras2.py                    its configs and arrays
    unwrap    unwrap.py                    the single model inside the parallel one
    rebuild   rebuild.py, masks.py         that model in Keras 3, without weights
    match     weight_tree.py, match.py     the array for each variable
    write     write.py, training_state.py  the new file, read back and compared
    check     check_outputs.py             the outputs of the new model
    report    rescue_report.py             the findings and the table of weights
"""
