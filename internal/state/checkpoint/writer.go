package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/optim/kernel"
)

// pageCache is the spare memory that all files of this process share.
var pageCache = newSpare(0)

// owner says which rank's files they are, and of which step.
type owner struct {
	rank, world    int
	part, identity string
	step           int64
}

// dataFile writes a safetensors file, and then the manifest beside it.
type dataFile struct {
	folder, name string
	file         *os.File
	header       []byte
	bytes        int64 // of the file
	document     any   // the manifest
	back         *writeback
}

// newDataFile makes the safetensors file in its full size, with the header. It removes the
// files of an earlier attempt, the manifest first: the old manifest must not describe
// the new file.
func newDataFile(directory string, of owner, header []byte, bytes int64, manifest any) (*dataFile, error) {
	folder, err := savingFolder(directory, of.step, of.world)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	w := &dataFile{
		folder: folder.Name(), name: fileName(of.rank, of.world, of.part), header: header, bytes: bytes,
		document: manifest,
	}
	if w.file, err = claim(w.path(dataSuffix)); err != nil {
		_ = os.Remove(w.folder) // succeeds if nothing is in it
		return nil, err
	}
	err = os.Remove(w.path(manifestEnd))
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = w.file.Truncate(0)
	}
	if err == nil {
		err = w.begin()
	}
	if err != nil {
		return nil, errors.Join(err, w.discard())
	}
	return w, nil
}

// writer writes the files of a shard.
type writer struct {
	*dataFile
	first    int64 // element of the shard that the file begins with
	layout   *layout
	manifest *manifest
}

func newWriter(directory string, s Shard, l *layout, step int64, training jsontext.Value) (*writer, error) {
	header, err := safetensorsHeader(ShardSchema, step, l.tensors())
	if err != nil {
		return nil, err
	}
	m := newManifest(s, l, step, header, training)
	file, err := newDataFile(directory, s.owner(step), header, m.Bytes, m)
	if err != nil {
		return nil, err
	}
	return &writer{dataFile: file, layout: l, manifest: m}, nil
}

// claim opens a file for one writer: two would overwrite each other's bytes. The file is
// free again when it is closed, or its process ends. File systems that cannot lock files
// do without.
func claim(path string) (*os.File, error) {
	open := func() (*os.File, error) {
		file, _, err := files.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
		return file, err
	}
	file, err := lock(path, open, alone|atOnce)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fault.File(path).Inputf("another job is saving the same step in this folder and is writing this " +
			"file").WithHint("give each job, and each optimizer of a program, a folder of its own")
	}
	var other *files.NotRegular
	if errors.As(err, &other) {
		return nil, &fault.Input{
			Where: fault.Position{File: path}, What: "a file of the checkpoint belongs here, and something else is " +
				"in its place", Err: other,
			Hint: "move it away and save again",
		}
	}
	return file, err
}

// lockFolder opens a folder, and locks it until it is closed. Many saves may begin files
// in a folder at once (together). A commit has the folder alone (alone).
func lockFolder(path string, how int) (*os.File, error) {
	open := func() (*os.File, error) { return os.OpenFile(path, os.O_RDONLY|directoryOnly, 0) }
	return lock(path, open, how)
}

// lock opens the file or folder that has a name, and locks it until it is closed.
func lock(path string, open func() (*os.File, error), how int) (*os.File, error) {
	for {
		file, err := open()
		if err != nil {
			return nil, err
		}
		for err = syscall.EINTR; errors.Is(err, syscall.EINTR); {
			err = flock(file, how)
		}
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(err, file.Close())
		}
		if now, err := os.Stat(path); err == nil && isOpen(file, now) {
			return file, nil
		}
		if err := file.Close(); err != nil { // another file may have its name by now: try again
			return nil, err
		}
	}
}

// isOpen reports whether an open file is the one that was found.
func isOpen(file *os.File, found fs.FileInfo) bool {
	own, err := file.Stat()
	return err == nil && os.SameFile(own, found)
}

func (w *dataFile) path(suffix string) string { return filepath.Join(w.folder, w.name+suffix) }

// begin takes the room, so that a file system that is too small fails now, and writes
// the header.
func (w *dataFile) begin() error {
	if err := w.checkRoom(); err != nil {
		return err
	}
	switch err := allocate(w.file, w.bytes); {
	case err == nil:
	case errors.Is(err, errors.ErrUnsupported): // then writes take the room
	default:
		return fmt.Errorf("%s: allocating %v: %w", w.file.Name(), ledger.Bytes(w.bytes), err)
	}
	w.back = newWriteback(fileOnDisk{w.file}, w.bytes, window, pageCache)
	return w.writeAt(w.header, 0)
}

// checkRoom compares the size of the files with the free room.
func (w *dataFile) checkRoom() error {
	manifest, err := seal(w.document)
	if err != nil {
		return err
	}
	block, free, err := freeBlocks(w.file)
	if err != nil {
		return fmt.Errorf("%s: statfs: %w", w.file.Name(), err)
	}
	if len(manifest) > maxManifest {
		return fmt.Errorf("%s: the manifest would have %d bytes, and at most %d can be read again",
			w.path(manifestEnd), len(manifest), maxManifest)
	}
	needed := (w.bytes+block-1)/block*block + (int64(len(manifest))+block-1)/block*block
	if available := free * block; needed > available {
		return &DoesNotFit{
			Directory: filepath.Dir(w.folder),
			Needed:    ledger.Bytes(needed), Available: ledger.Bytes(available),
		}
	}
	return nil
}

// write writes a chunk, which begins at an element of the file, straight from its
// memory. Several goroutines may write at once. write waits for the disk if there is no
// spare memory. A caller that can wait calls pace before.
func (w *writer) write(first int64, c kernel.Chunk) error {
	if err := w.back.failed(); err != nil {
		return fmt.Errorf("%s: %w", w.file.Name(), err)
	}
	number := w.layout.ChunkAt(first).Number
	for _, r := range w.layout.regions(number) {
		stream := &w.layout.saved[r.stream]
		b := c.Bytes(stream.Role)
		if int64(len(b)) != r.bytes {
			return fmt.Errorf("%s: chunk %d has %d bytes of %s, expected %d",
				w.file.Name(), number, len(b), stream.Arena, r.bytes)
		}
		if err := w.writeAt(b, w.manifest.Header+r.offset); err != nil {
			return err
		}
		// The checksum comes after the write: copying is the fastest way to bring
		// the bytes into the cache.
		w.manifest.Streams[r.stream].Sums[r.sum] = checksum(b)
	}
	return nil
}

func (w *dataFile) writeAt(b []byte, offset int64) error {
	w.back.take(int64(len(b)))
	if _, err := w.file.WriteAt(b, offset); err != nil {
		w.back.fail(err)
		return err
	}
	w.back.wrote(offset, int64(len(b)))
	return nil
}

// finish brings the file to the disk, and then the manifest: a manifest says that its
// file is complete. Until both are there, the writer keeps its claim to the file.
func (w *dataFile) finish() error {
	err := w.back.close()
	if err == nil {
		err = files.ToDisk(w.file)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", w.file.Name(), err)
	}
	forget(w.file, 0, 0)
	if err := writeSealed(w.path(manifestEnd), w.document); err != nil {
		return err
	}
	return errors.Join(files.SyncFolder(w.folder), w.file.Close())
}

var errDiscarded = errors.New("the file is discarded")

// discard removes the files of a shard that cannot be finished.
func (w *dataFile) discard() error {
	if w.back != nil {
		w.back.fail(errDiscarded)
		_ = w.back.close()
	}
	err := os.Remove(w.path(dataSuffix))
	if gone := os.Remove(w.path(manifestEnd)); !errors.Is(gone, fs.ErrNotExist) {
		err = errors.Join(err, gone)
	}
	_ = w.file.Close()      // it may be closed already; from here on another writer may have the name
	_ = os.Remove(w.folder) // succeeds if nothing else is in it
	return err
}
