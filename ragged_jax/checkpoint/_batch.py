"""`Batch`: what is to be read of a checkpoint, collected, so that neighbours are read together."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from ._files import Want, cut
from ._manifest import FileEntry
from ._threads import in_threads

_TASK_NBYTES = 16 << 20


class Batch:
    """Ranges of files to be read together, several at a time, when the block that collects them ends.

    Ranges that follow each other in a file, such as the shards of the devices of one process, are read in one go, and
    the chunks at their borders once. Made by `Checkpoint.batch`.
    """

    def __init__(self, read: Callable[[FileEntry, Sequence[Want]], None], chunk_nbytes: int):
        self._read = read
        self._step = chunk_nbytes * max(1, _TASK_NBYTES // chunk_nbytes)
        self._files: dict[str, FileEntry] = {}
        self._wants: dict[str, list[Want]] = defaultdict(list)

    def add(self, file: FileEntry, want: Want) -> None:
        self._files[file.name] = file
        self._wants[file.name].append(want)

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind is None:
            self.run()

    def run(self) -> None:
        """Reads what was collected.

        Raises:
          CheckpointError: some of it is damaged; file, tensor and range are named.
        """
        tasks = [(self._files[name], task) for name, wants in self._wants.items() for task in self._tasks(wants)]
        self._wants.clear()
        in_threads(lambda at: self._read(*tasks[at]), range(len(tasks)))

    def _tasks(self, wants: Iterable[Want]) -> Iterator[list[Want]]:
        rising, end = [], 0
        for want in sorted(wants, key=lambda want: want.offset):
            if want.offset < end:  # the same bytes for somebody else
                yield [want]
            else:
                rising.append(want)
                end = want.offset + want.out.nbytes
        for _, task in groupby(cut(rising, self._step), lambda part: part.offset // self._step):
            yield list(task)
