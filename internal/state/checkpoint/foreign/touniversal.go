package foreign

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
)

// oldestUniversal is the release of DeepSpeed that brought universal checkpoints. A
// checkpoint names the release that has written it.
const oldestUniversal = "0.14.0"

// WriteUniversal writes the checkpoint as a universal one of DeepSpeed, which any number
// of ranks load with "checkpoint": {"load_universal": true}. It is a folder in the
// directory, and a file there names it. Memory does not grow with the state.
func WriteUniversal(ctx context.Context, c *checkpoint.Checkpoint, directory string, progress func(bytes int64)) error {
	tag := fmt.Sprintf("global_step%d", c.Step())
	path := filepath.Join(directory, tag)
	if c.Algorithm() != kernel.Adam {
		return fault.File(c.Path()).Inputf("it is the state of %v, and universal checkpoints of DeepSpeed are written "+
			"for Adam and AdamW", c.Algorithm()).WithHint("use --to torch")
	}
	if err := c.OneStep("DeepSpeed"); err != nil {
		return err
	}
	err := writeFolder(path, func(folder string) error {
		u := &universalWriter{exporter: newExporter(c, io.Discard, progress), folder: folder}
		return u.write(ctx)
	})
	if err != nil {
		return err
	}
	if err := files.Replace(filepath.Join(directory, "latest_universal"), []byte(tag)); err != nil {
		return err
	}
	return files.SyncFolder(directory)
}

// writeFolder writes a folder that is complete or not there: in a hidden one beside it,
// which gets its name at the end.
func writeFolder(path string, write func(folder string) error) error {
	if checkpoint.Exists(path) {
		return fault.File(path).Inputf("a file or folder of this name is here already").WithHint("name another folder")
	}
	directory := filepath.Dir(path)
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return checkpoint.Cause(directory, "checkpoints cannot be written here", errors.Unwrap(err))
	}
	folder, err := os.MkdirTemp(directory, checkpoint.SavingPrefix+filepath.Base(path)+"-")
	if err != nil {
		return checkpoint.Cause(directory, "checkpoints cannot be written here", err)
	}
	err = os.Chmod(folder, 0o755)
	if err == nil {
		err = write(folder)
	}
	if err == nil {
		err = files.SyncFolders(folder)
	}
	if err == nil {
		err = os.Rename(folder, path)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(folder))
	}
	return files.SyncFolder(directory)
}

// universalWriter writes the files of a universal checkpoint.
type universalWriter struct {
	*exporter // says which parameters and streams there are, and in which order
	folder    string
}

func (u *universalWriter) write(ctx context.Context) error {
	for _, p := range u.parameters {
		if filepath.Base(p.Name) != p.Name || p.Name == ".." || p.Name == "." {
			return fault.File(u.c.Path()).Inputf("parameter %q cannot name a folder", p.Name)
		}
		own := filepath.Join(u.folder, universalFolder, p.Name)
		if err := os.MkdirAll(own, 0o755); err != nil {
			return err
		}
		for i, role := range u.roles {
			document := func(d *pickle.Writer) { d.Text(paramMember); d.Tensor("0", p.Shape) }
			err := saveTorch(filepath.Join(own, universalStreams[i]+".pt"), dictOf(document), func(w io.Writer) error {
				return u.c.Export(ctx, p, role, w, u.progress)
			})
			if err != nil {
				return err
			}
		}
		err := saveTorch(filepath.Join(own, "step.pt"), scalar, func(w io.Writer) error {
			_, err := w.Write(stepBytes(u.c.Step()))
			return err
		})
		if err != nil {
			return err
		}
	}
	global := filepath.Join(u.folder, universalFolder, "optimizer_state.pt")
	if err := saveTorch(global, dictOf(u.global), nil); err != nil {
		return err
	}
	for _, stage := range []string{"", "zero_pp_rank_0_"} { // ZeRO 3 reads the latter
		file := filepath.Join(u.folder, stage+"mp_rank_00_model_states.pt")
		if err := saveTorch(file, dictOf(u.model), nil); err != nil {
			return err
		}
	}
	return nil
}

// scalar writes a number, and dictOf a dict with members.
func scalar(p *pickle.Writer) { p.Tensor("0", nil) }

func dictOf(members func(*pickle.Writer)) func(*pickle.Writer) {
	return func(p *pickle.Writer) { p.Dict(func() { members(p) }) }
}

// saveTorch writes a file of torch.save: a document, and the numbers of the one tensor in it, if it has one.
func saveTorch(path string, document func(*pickle.Writer), numbers func(io.Writer) error) error {
	return writeNew(path, func(w io.Writer) error { return writeArchive(w, document, numbers) })
}

// writeNew writes a new file, and brings it to the disk.
func writeNew(path string, write func(io.Writer) error) error {
	file, _, err := files.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer file.Close()
	buffer := bufio.NewWriterSize(file, 1<<16)
	if err = write(buffer); err == nil {
		err = buffer.Flush()
	}
	if err == nil {
		err = files.ToDisk(file)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return file.Close()
}

// global writes what all parameters have in common. The optimizer's hyperparameters are
// the trainer's. ZeRO 3 takes the step from here, and gives the same object to all its
// subgroups, each of which adds 1 to it. So it is no tensor, which would count all their
// steps, but an int, as DeepSpeed's own optimizers have it. Those of torch.optim refuse it.
func (u *universalWriter) global(p *pickle.Writer) {
	p.Text("ds_version")
	p.Text(oldestUniversal)
	u.paramGroups(p)
	p.Text("optimizer_state_dict")
	p.Dict(func() {
		p.Text("state")
		p.Dict(func() {
			p.Int(0)
			p.Dict(func() {
				p.Text("step")
				p.Int(u.c.Step())
			})
		})
		u.paramGroups(p)
	})
}

// paramGroups writes the parameter groups. DeepSpeed has one flat parameter in each.
func (u *universalWriter) paramGroups(p *pickle.Writer) {
	p.Text("param_groups")
	p.List(func() {
		for number := range u.byGroup() {
			p.Dict(func() {
				p.Text("params")
				p.List(func() { p.Int(int64(number)) })
			})
		}
	})
}

// model writes what DeepSpeed reads beside the state. The weights are in the state.
func (u *universalWriter) model(p *pickle.Writer) {
	p.Text("module")
	p.Dict(func() {})
	p.Text("param_shapes")
	p.List(func() {
		for _, group := range u.byGroup() {
			p.Dict(func() {
				for _, parameter := range group {
					p.Text(parameter.Name)
					p.Ints(parameter.Shape)
				}
			})
		}
	})
	p.Text("lr_scheduler")
	p.WriteByte(pickle.OpNone)
	p.Text("skipped_steps")
	p.Int(0)
	p.Text("global_steps")
	p.Int(u.c.Step())
	for _, size := range []string{"dp_world_size", "mp_world_size"} {
		p.Text(size)
		p.Int(1)
	}
	p.Text("ds_config")
	p.Dict(func() {})
	p.Text("ds_version")
	p.Text(oldestUniversal)
}
