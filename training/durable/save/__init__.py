"""Saves: tensors of ranks, or a program's folder, become a checkpoint, and a run resumes from it.

Promises that a checkpoint exists only once the head names it, that it is the state of one moment,
that every byte is verified before it is used, and that nothing is unpickled. Uses attempt,
record and store.

The way of a save, station by station (tests/training/durable/save/test_way.py walks it):

    the tensors of a trainer                    a program's folder
    tensors.policy.CheckpointPolicy             snapshots.watcher.Watcher
      what is saved at this boundary, and why     when the folder is captured
    tensors.schedule.Schedule                   snapshots.quiet.QuietTime
      whether the next save is due                whether the program's save is over
    tensors.checkpointer.Checkpointer           snapshots.mirror.Mirror
      one save at a time, behind the training     one capture after another
    tensors.state.HostCopy                      snapshots.capture.Capture
      the state of this moment                    the folder of this moment
    tensors.checkpointer.TensorSave             snapshots.folder_saves.FolderSave
      sends its files                             sends the blobs that the store lacks

                    publish.Save: its thread, its retries, its cancellation
                    publish.CheckpointPublisher: sends, then
                    record.lease.Lease.publish: the one conditional write of the head

And back: tensors.resume.Resume.find_newest, or snapshots.restore.fill.
"""
