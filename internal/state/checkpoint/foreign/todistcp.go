package foreign

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Keys of a checkpoint of torch.distributed.checkpoint, as of {"model": ..., "optim": ...}
// with the dicts of get_state_dict.
const (
	modelKey = "model"
	optimKey = "optim"
)

// maxBlob bounds the numbers of a chunk of a tensor. Ranks read full chunks to take their
// part of them.
const maxBlob = 16 << 20

// distcpFile is the file of all chunks.
const distcpFile = "__0_0.distcp"

// WriteDistributed writes the checkpoint as a folder of torch.distributed.checkpoint, which
// any number of ranks load. Its metadata are written last. Memory does not grow with
// the state.
func WriteDistributed(ctx context.Context, c *checkpoint.Checkpoint, path string, progress func(bytes int64)) error {
	return writeDistributed(ctx, c, path, maxBlob, progress)
}

func writeDistributed(
	ctx context.Context, c *checkpoint.Checkpoint, path string, limit int64, progress func(bytes int64),
) error {
	if c.Algorithm() == kernel.SGD && c.Step() == 0 {
		return fault.File(c.Path()).Inputf("it is the state of SGD before its first step, which has no momentum yet").
			WithHint("use --to torch")
	}
	return writeFolder(path, func(folder string) error {
		d := &distcpWriter{exporter: newExporter(c, io.Discard, progress), limit: limit}
		err := writeNew(filepath.Join(folder, distcpFile), func(w io.Writer) error {
			d.file = &counter{w: w}
			return d.write(ctx)
		})
		if err != nil {
			return err
		}
		return writeNew(filepath.Join(folder, metadataName), func(w io.Writer) error {
			_, err := w.Write(d.metadata())
			return err
		})
	})
}

// distcpWriter writes the files of a checkpoint of torch.distributed.checkpoint.
type distcpWriter struct {
	*exporter // says which parameters and streams there are, and in which order
	limit     int64
	file      *counter
	saved     []savedItem
}

// savedItem is a tensor or, without shape, another object.
type savedItem struct {
	path   []any // of keys and numbers, in the dict that is saved
	shape  []int64
	chunks []savedChunk
}

// key is the name of the item: its path in one text.
func (s *savedItem) key() string {
	key := fmt.Sprint(s.path[0])
	for _, part := range s.path[1:] {
		key += fmt.Sprintf(".%v", part)
	}
	return key
}

func (d *distcpWriter) write(ctx context.Context) error {
	for _, p := range d.parameters {
		paths := [][]any{{modelKey, p.Name}}
		for _, component := range d.components {
			paths = append(paths, []any{optimKey, "state", p.Name, component})
		}
		for i, role := range d.roles {
			if err := d.tensor(ctx, paths[i], p, role); err != nil {
				return err
			}
		}
		step := savedItem{path: []any{optimKey, "state", p.Name, "step"}, shape: []int64{}}
		step.chunks = []savedChunk{{}}
		err := d.blob(&step.chunks[0], scalar, func(w io.Writer) error {
			_, err := w.Write(stepBytes(d.c.StepOf(p.Name)))
			return err
		})
		if err != nil {
			return err
		}
		d.saved = append(d.saved, step)
	}
	return d.groups()
}

// tensor writes a stream of a parameter, in chunks of rows.
func (d *distcpWriter) tensor(ctx context.Context, path []any, p shard.Piece, role kernel.Role) error {
	item := savedItem{path: path, shape: slices.Clone(p.Shape)}
	for _, c := range chunksOf(p, d.limit) {
		own := p
		own.Range, _ = rowsOf(c, p.Shape) // is rows
		err := d.blob(&c, func(w *pickle.Writer) { w.Tensor("0", c.sizes) }, func(w io.Writer) error {
			return d.c.Export(ctx, own, role, w, d.progress)
		})
		if err != nil {
			return err
		}
		item.chunks = append(item.chunks, c)
	}
	d.saved = append(d.saved, item)
	return nil
}

// chunksOf cuts a parameter into chunks of rows of at most limit numbers, or of one row.
func chunksOf(p shard.Piece, limit int64) []savedChunk {
	if len(p.Shape) == 0 {
		return []savedChunk{{}}
	}
	rows := p.Shape[0]
	each := max(1, limit/max(1, p.Count/max(1, rows)))
	var chunks []savedChunk
	for first := int64(0); first < rows; first += each {
		c := savedChunk{offsets: make([]int64, len(p.Shape)), sizes: slices.Clone(p.Shape)}
		c.offsets[0], c.sizes[0] = first, min(each, rows-first)
		chunks = append(chunks, c)
	}
	return chunks
}

// groups writes the names of the parameters in each group. Hyperparameters are the
// trainer's: a loader that expects them finds no such key, and says so.
func (d *distcpWriter) groups() error {
	for number, group := range d.byGroup() {
		item := savedItem{path: []any{optimKey, "param_groups", number, "params"}, chunks: []savedChunk{{}}}
		err := d.blob(&item.chunks[0], func(w *pickle.Writer) {
			w.List(func() {
				for _, p := range group {
					w.Text(p.Name)
				}
			})
		}, nil)
		if err != nil {
			return err
		}
		d.saved = append(d.saved, item)
	}
	return nil
}

// blob writes an archive, and notes its place.
func (d *distcpWriter) blob(c *savedChunk, document func(*pickle.Writer), numbers func(io.Writer) error) error {
	c.blob = blob{distcpFile, shard.Range{First: d.file.written}}
	if err := writeArchive(d.file, document, numbers); err != nil {
		return err
	}
	c.blob.Count = d.file.written - c.blob.First
	return nil
}

// Modules of the classes in the metadata.
const (
	metadataModule   = "torch.distributed.checkpoint.metadata"
	filesystemModule = "torch.distributed.checkpoint.filesystem"
)

// metadata returns the pickle that says what is where.
func (d *distcpWriter) metadata() []byte {
	return pickle.Document(func(w *pickle.Writer) {
		p := distcpPickler{w}
		p.Object(metadataModule, "Metadata", func() {
			p.Dict(func() {
				p.Text("state_dict_metadata")
				p.Dict(func() { p.each(d.saved, p.item) })
				p.Text("planner_data")
				p.Dict(func() { p.each(d.saved, func(item *savedItem) { p.path(item.path) }) })
				p.Text("storage_data")
				p.Dict(func() { p.places(d.saved) })
			})
		})
	})
}

// distcpPickler writes the classes of torch.distributed.checkpoint.
type distcpPickler struct{ *pickle.Writer }

// each writes the key of each item and what value writes.
func (p distcpPickler) each(saved []savedItem, value func(*savedItem)) {
	for i := range saved {
		p.Text(saved[i].key())
		value(&saved[i])
	}
}

func (p distcpPickler) path(path []any) {
	p.Tuple(func() {
		for _, part := range path {
			if number, ok := part.(int); ok {
				p.Int(int64(number))
			} else {
				p.Text(fmt.Sprint(part))
			}
		}
	})
}

func (p distcpPickler) size(numbers []int64) {
	p.Call("torch", "Size", func() { p.Ints(numbers) })
}

// item writes what kind of object an item is.
func (p distcpPickler) item(item *savedItem) {
	if item.shape == nil {
		p.Object(metadataModule, "BytesStorageMetadata", func() { p.WriteByte(pickle.OpEmptyDict) })
		return
	}
	p.Object(metadataModule, "TensorStorageMetadata", func() {
		p.Dict(func() {
			p.Text("properties")
			p.Object(metadataModule, "TensorProperties", p.properties)
			p.Text("size")
			p.size(item.shape)
			p.Text("chunks")
			p.List(func() {
				for _, c := range item.chunks {
					p.Object(metadataModule, "ChunkStorageMetadata", func() {
						p.Dict(func() {
							p.Text("offsets")
							p.size(c.offsets)
							p.Text("sizes")
							p.size(c.sizes)
						})
					})
				}
			})
		})
	})
}

// properties writes the state of TensorProperties that all releases read: dtype, layout,
// requires_grad, memory format and pin_memory.
func (p distcpPickler) properties() {
	p.Tuple(func() {
		p.Global("torch", "float32")
		p.Call("torch.serialization", "_get_layout", func() { p.Text("torch.strided") })
		p.WriteByte(pickle.OpNewFalse)
		p.Call(metadataModule, "_MEM_FORMAT_ENCODING", func() { p.Int(0) }) // contiguous
		p.WriteByte(pickle.OpNewFalse)
	})
}

// places writes where every chunk and object is.
func (p distcpPickler) places(saved []savedItem) {
	for i := range saved {
		for number, c := range saved[i].chunks {
			p.Object(metadataModule, "MetadataIndex", func() {
				p.Dict(func() {
					p.Text("fqn")
					p.Text(saved[i].key())
					if saved[i].shape != nil {
						p.Text("offset")
						p.size(c.offsets)
						p.Text("index")
						p.Int(int64(number))
					}
				})
			})
			p.Object(filesystemModule, "_StorageInfo", func() {
				p.Dict(func() {
					p.Text("relative_path")
					p.Text(c.blob.file)
					p.Text("offset")
					p.Int(c.blob.First)
					p.Text("length")
					p.Int(c.blob.Count)
				})
			})
		}
	}
}
