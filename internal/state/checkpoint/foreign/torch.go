package foreign

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
	"slices"
	"strconv"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
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
func WriteTorch(ctx context.Context, c *checkpoint.Checkpoint, path string, progress func(bytes int64)) error {
	return writeTorch(ctx, c, path, nil, progress)
}

func writeTorch(
	ctx context.Context, c *checkpoint.Checkpoint, path string, like *torchLike, progress func(bytes int64),
) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fault.File(path).Inputf("expected a file to write: a file cannot replace the folder or device here").
			WithHint("name a file")
	}
	file, err := files.NewPending(path)
	if err != nil {
		return checkpoint.Cause(path, "the file cannot be written", err)
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
	return files.SyncFolder(filepath.Dir(path))
}

// exporter writes the archive. It numbers the storages in the order in which it writes
// them. Each parameter has a storage for its step, its master weights and each moment.
// No two parameters share a storage: torch would count every step once for each of them.
type exporter struct {
	c          *checkpoint.Checkpoint
	parameters []shard.Piece // by parameter group, or as like has them
	like       *torchLike    // the optimizer that shall load the file, or nil
	roles      []kernel.Role
	components []string // of the moments
	archiveWriter
	progress func(bytes int64)
}

func newExporter(c *checkpoint.Checkpoint, w io.Writer, progress func(bytes int64)) *exporter {
	e := &exporter{
		c: c, archiveWriter: newArchiveWriter(w), parameters: c.Pieces(),
		roles: []kernel.Role{kernel.MasterRole}, progress: progress,
	}
	slices.SortStableFunc(e.parameters, func(a, b shard.Piece) int { return cmp.Compare(a.Group, b.Group) })
	if c.Algorithm() == kernel.SGD && c.Step() == 0 {
		return e // if there were a momentum, torch would dampen its first step
	}
	for _, stream := range c.ExportFormat().MomentStreams() {
		e.roles = append(e.roles, stream.Role)
		e.components = append(e.components, string(stream.Component))
	}
	return e
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
					e.like.writeGroups(p, e.c.Step())
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
func (e *exporter) state(p *pickle.Writer, i int, parameter shard.Piece) {
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
func (e *exporter) byGroup() [][]shard.Piece {
	var groups [][]shard.Piece
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
func (e *exporter) parameter(ctx context.Context, number int, p shard.Piece) error {
	if err := e.entry("data/"+e.storage(number, stepStorage), stepBytes(e.c.StepOf(p.Name))); err != nil {
		return err
	}
	for i, role := range e.roles {
		w, err := e.create("data/" + e.storage(number, masterStorage+i))
		if err != nil {
			return err
		}
		if err := e.c.Export(ctx, p, role, w, e.progress); err != nil {
			return err
		}
	}
	return nil
}

// stepBytes returns a step as torch counts it: in fp32.
func stepBytes(step int64) []byte {
	return binary.LittleEndian.AppendUint32(nil, math.Float32bits(float32(step)))
}

// BytesOfTorch returns the number of bytes that WriteTorch reports as progress.
func BytesOfTorch(c *checkpoint.Checkpoint) int64 {
	var elements int64
	for _, p := range c.Pieces() {
		elements += p.Count
	}
	return 4 * elements * int64(len(newExporter(c, io.Discard, nil).roles))
}
