package checkpoint

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"plimsoll/internal/base/pickle"
	"slices"
	"strconv"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// A file of torch.save is a zip archive. It has a pickle, and the numbers of every
// storage in an entry of their own, not compressed.

// WriteTorch writes the checkpoint as a file for torch.load, so that training can go on
// without Plimsoll. The file is a dict with the "state" and "param_groups" of a
// torch.optim optimizer, the "names" of the parameters in the order of param_groups,
// and their fp32 "master" weights by name. Match parameters by name, not by position:
// the order of the trainer's optimizer is not known. Memory does not grow with the
// state.
func (c *Checkpoint) WriteTorch(ctx context.Context, path string, progress func(bytes int64)) error {
	return c.writeTorch(ctx, path, nil, progress)
}

func (c *Checkpoint) writeTorch(
	ctx context.Context, path string, like *torchLike, progress func(bytes int64),
) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fault.File(path).Inputf("expected a file to write: a file cannot replace the folder or device here").
			WithHint("name a file")
	}
	file, err := files.NewPending(path)
	if err != nil {
		return cause(path, "the file cannot be written", err)
	}
	defer file.Cleanup()
	buffer := bufio.NewWriterSize(file, 1<<20)
	e := newExporter(c, buffer, progress)
	if like != nil {
		e.like, e.parameters = like, like.parameters
	}
	if err := e.write(ctx); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := buffer.Flush(); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := file.CloseAtomicallyReplace(); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return syncFolder(filepath.Dir(path))
}

// exporter writes the archive. It numbers the storages in the order in which it writes
// them. Each parameter has a storage for its step, its master weights and each moment.
// No two parameters share a storage: torch would count every step once for each of them.
type exporter struct {
	c          *Checkpoint
	parameters []*parameter // by parameter group, or as like has them
	like       *torchLike   // the optimizer that shall load the file, or nil
	roles      []kernel.Role
	components []string // of the moments
	archiveWriter
	progress func(bytes int64)
}

func newExporter(c *Checkpoint, w io.Writer, progress func(bytes int64)) *exporter {
	e := &exporter{
		c: c, archiveWriter: newArchiveWriter(w), roles: []kernel.Role{kernel.MasterRole}, progress: progress,
	}
	for _, name := range c.names {
		e.parameters = append(e.parameters, c.parameters[name])
	}
	slices.SortStableFunc(e.parameters, func(a, b *parameter) int { return cmp.Compare(a.Group, b.Group) })
	if c.Algorithm() == kernel.SGD && c.step == 0 {
		return e // if there were a momentum, torch would dampen its first step
	}
	for _, stream := range exportFormat(c).MomentStreams() {
		e.roles = append(e.roles, stream.Role)
		e.components = append(e.components, string(stream.Component))
	}
	return e
}

// exportFormat returns the format of the file: everything in fp32.
func exportFormat(c *Checkpoint) kernel.Format {
	return kernel.Format{Algorithm: c.Algorithm(), State: kernel.FP32, Parameter: dtype.F32, Gradient: dtype.F32}
}

// Storages of a parameter, before its moments.
const stepStorage, masterStorage = 0, 1

// storage returns the key of a storage of a parameter.
func (e *exporter) storage(parameter, number int) string {
	return strconv.Itoa(parameter*(masterStorage+len(e.roles)) + number)
}

func (e *exporter) write(ctx context.Context) error {
	if err := e.begin(e.pickle()); err != nil {
		return err
	}
	for i, p := range e.parameters {
		if err := e.parameter(ctx, i, p); err != nil {
			return err
		}
	}
	return e.end()
}

// pickle returns the document. It has tensors without their numbers.
func (e *exporter) pickle() []byte {
	return pickle.Document(func(p *pickle.Writer) {
		p.Dict(func() {
			p.Text("state")
			p.Dict(func() {
				for i, parameter := range e.parameters {
					p.Value(e.key(i))
					p.Dict(func() { e.state(p, i, parameter) })
				}
			})
			p.Text("param_groups")
			p.List(func() {
				if e.like != nil {
					e.like.writeGroups(p, e.c.step)
					return
				}
				e.groups(p)
			})
			p.Text("names")
			p.List(func() {
				for _, parameter := range e.parameters {
					p.Text(parameter.Name)
				}
			})
			p.Text("master")
			p.Dict(func() {
				for i, parameter := range e.parameters {
					p.Text(parameter.Name)
					p.Tensor(e.storage(i, masterStorage), parameter.Shape)
				}
			})
		})
	})
}

// key returns the key of a parameter's state.
func (e *exporter) key(i int) any {
	if e.like != nil {
		return e.like.keys[i]
	}
	return int64(i)
}

// state writes the optimizer state of a parameter.
func (e *exporter) state(p *pickle.Writer, i int, parameter *parameter) {
	if e.like == nil || !e.like.stepless[i] {
		p.Text("step")
		p.Tensor(e.storage(i, stepStorage), nil)
	}
	for number, component := range e.components {
		p.Text(component)
		p.Tensor(e.storage(i, masterStorage+1+number), parameter.Shape)
	}
}

// groups writes the parameter groups, without hyperparameters: the trainer has these.
func (e *exporter) groups(p *pickle.Writer) {
	for i := 0; i < len(e.parameters); {
		group := e.parameters[i].Group
		p.Dict(func() {
			p.Text("params")
			p.List(func() {
				for ; i < len(e.parameters) && e.parameters[i].Group == group; i++ {
					p.Int(int64(i))
				}
			})
		})
	}
}

// byGroup returns the parameters of each parameter group.
func (e *exporter) byGroup() [][]*parameter {
	var groups [][]*parameter
	for i, p := range e.parameters {
		if i == 0 || p.Group != e.parameters[i-1].Group {
			groups = append(groups, nil)
		}
		last := len(groups) - 1
		groups[last] = append(groups[last], p)
	}
	return groups
}

// parameter writes the storages of a parameter.
func (e *exporter) parameter(ctx context.Context, number int, p *parameter) error {
	if err := e.entry("data/"+e.storage(number, stepStorage), stepBytes(e.c.stepOf(p.Name))); err != nil {
		return err
	}
	for i, role := range e.roles {
		w, err := e.create("data/" + e.storage(number, masterStorage+i))
		if err != nil {
			return err
		}
		if err := e.c.export(ctx, p.Piece, role, w, e.progress); err != nil {
			return err
		}
	}
	return nil
}

// stepBytes returns a step as torch counts it: in fp32.
func stepBytes(step int64) []byte {
	return binary.LittleEndian.AppendUint32(nil, math.Float32bits(float32(step)))
}

// export writes a stream of a range of a parameter in fp32.
func (c *Checkpoint) export(
	ctx context.Context, p shard.Piece, role kernel.Role, w io.Writer, progress func(bytes int64),
) error {
	p.Moments = kernel.MomentsFP32
	l, err := layoutOfPieces(exportFormat(c), []shard.Piece{p})
	if err != nil {
		return err
	}
	loader, err := c.newLoader(l, 0)
	if err != nil {
		return err
	}
	return loader.each(ctx, 1, []kernel.Role{role}, func(_ shard.Chunk, chunk kernel.Chunk) error {
		n, err := w.Write(chunk.Bytes(role))
		if progress != nil {
			progress(int64(n))
		}
		return err
	})
}

// ExportBytes returns the number of bytes that WriteTorch reports as progress.
func (c *Checkpoint) ExportBytes() int64 {
	var elements int64
	for _, p := range c.parameters {
		elements += p.Count
	}
	return 4 * elements * int64(len(newExporter(c, io.Discard, nil).roles))
}
