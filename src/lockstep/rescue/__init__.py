"""Convert old multi-GPU files to single-device files.

The public functions are `lockstep.inspect`, `lockstep.rescue` and `lockstep.load_weights`.
They stand in `api.py`, which calls the steps in this order:

    detect    detect.py                    the kind of the file
    read      read.py, hdf5.py, unwrap.py  its configs and arrays, and its template
    rebuild   rebuild.py, old_layers.py    that model in Keras 3, without weights
    match     match.py, match_by_name.py, match_by_order.py, weight_tree.py
                                           the array for each variable
    masks     old_masks.py                 whether masks are those of the old library
    compile   training_state.py            loss, metrics, optimizer and frozen layers
    write     write.py, exactness.py       the new file, read back and compared
    check     outputs_check.py             the outputs, if they were given
    report    rescue_report.py             the findings and the table of weights
"""
