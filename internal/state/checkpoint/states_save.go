package checkpoint

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/state/states"
)

// Resting is the states of a rank while they rest: no step changes what was not read yet.
type Resting struct {
	Rank, World    int
	Part, Identity string // as of [Shard]
	Step           int64
	Chunks         []states.Chunk
	// Region returns the region of a chunk. Scalars are the numbers of all chunks, which nothing changes.
	Region  func(chunk int) []byte
	Scalars []uint64
	// Order is the order in which chunks are read. Read is called with the number of chunks that were read.
	Order []int
	Read  func(chunks int)
	// Awaited reports whether a step waits for the next chunk. Then the disk is not waited for.
	Awaited func() bool
}

// SaveStates begins to write states as they rest, and returns. See [Save].
func SaveStates(directory string, r Resting, training jsontext.Value) (*Saving, error) {
	of := owner{r.Rank, r.World, r.Part, r.Identity, r.Step}
	if err := validateName(r.Rank, r.World, r.Part); err != nil {
		return nil, err
	}
	training, err := checkTraining(training)
	if err != nil {
		return nil, err
	}
	tensors := tensorsOf(r.Chunks)
	header, err := safetensorsHeader(StatesSchema, r.Step, headerOf(tensors))
	if err != nil {
		return nil, err
	}
	m := &statesManifest{
		manifestHead: of.head(StatesSchema), Header: int64(len(header)), HeaderSum: checksums{checksum(header)},
		Block: sumBlock, Tensors: tensors, Training: training,
	}
	m.Bytes = m.Header
	for i := range tensors {
		m.Bytes += tensors[i].bytes()
	}
	file, removed, err := withRoom(directory, of, func() (*dataFile, error) {
		return newDataFile(directory, of, header, m.Bytes, m)
	})
	if err != nil {
		return nil, err
	}
	measureSpare()
	ctx, cancel := context.WithCancel(context.Background())
	x := file.begun(r.Step, cancel)
	x.removed = removed
	w := &statesWriter{dataFile: file, Resting: r, header: m.Header, byName: map[string]*tensorDocument{}}
	for i := range tensors {
		w.byName[tensors[i].Name] = &tensors[i]
	}
	go x.run(file, func() error { return w.write(ctx) })
	return x, nil
}

// statesWriter writes the states of a rank.
type statesWriter struct {
	*dataFile
	Resting
	header int64 // bytes before the data
	byName map[string]*tensorDocument
}

// write writes the numbers, and then chunk after chunk. It paces itself by the disk, unless a step waits.
func (w *statesWriter) write(ctx context.Context) error {
	stop := w.watch()
	defer stop()
	scalars := w.Scalars
	for _, c := range w.Chunks {
		for i, s := range c.Scalars {
			bits := binary.LittleEndian.AppendUint64(nil, scalars[i])
			if err := w.put(ctx, w.byName[s.Title()], bits[:s.Type.Size()]); err != nil {
				return err
			}
		}
		scalars = scalars[len(c.Scalars):]
	}
	for i, chunk := range w.Order {
		region := w.Region(chunk)
		for _, t := range w.Chunks[chunk].Tensors {
			if err := w.put(ctx, w.byName[t.Title()], region[t.Offset:t.Offset+t.Bytes()]); err != nil {
				return err
			}
		}
		w.Read(i + 1)
	}
	return nil
}

// watch wakes the writer, where it waits for the disk, when a step begins to wait for a chunk.
func (w *statesWriter) watch() (stop func()) {
	tick, done := time.NewTicker(5*time.Millisecond), make(chan struct{})
	go func() {
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				if w.Awaited() {
					w.back.wake()
				}
			}
		}
	}()
	return func() { tick.Stop(); close(done) }
}

// put writes a tensor, block by block.
func (w *statesWriter) put(ctx context.Context, t *tensorDocument, bytes []byte) error {
	for i := range t.Sums {
		block := bytes[i*sumBlock : min(len(bytes), (i+1)*sumBlock)]
		if err := w.back.paceUnless(ctx, w.Awaited); err != nil {
			return err
		}
		if err := w.writeAt(block, w.header+t.offset+int64(i)*sumBlock); err != nil {
			return err
		}
		t.Sums[i] = checksum(block)
	}
	return nil
}
