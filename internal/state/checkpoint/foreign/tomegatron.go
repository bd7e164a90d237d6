package foreign

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
)

var iterationFolder = lazyregexp.New(`^iter_(\d{7})$`)

// WriteMegatron writes the checkpoint as one of Megatron's dist_checkpointing. It is a folder in the directory, and a
// file there names it. like is a checkpoint of the job that shall load it: all but weights, moments and the optimizer's
// step are taken from there. Memory does not grow with the state.
func WriteMegatron(
	ctx context.Context, c *checkpoint.Checkpoint, directory, like string, progress func(bytes int64),
) error {
	like, err := latestIteration(like)
	if err == nil {
		err = checkBackend(like)
	}
	if err != nil {
		return err
	}
	name := fmt.Sprintf("iter_%07d", c.Step())
	if iterationFolder.MatchString(filepath.Base(like)) {
		name = filepath.Base(like)
	}
	m := newMegatron(ctx, like, nil)
	m.template = true
	defer m.close()
	template, err := m.open()
	if err == nil {
		err = cmp.Or(c.OneStep("Megatron"), checkTemplate(c, template, "Megatron"))
	}
	if err != nil {
		return inputOf(megatronKind, like, err)
	}
	err = writeFolder(filepath.Join(directory, name), func(folder string) error {
		return fillMegatron(ctx, c, m, folder, progress)
	})
	if err != nil {
		return err
	}
	number, _ := strconv.Atoi(name[len("iter_"):]) // digits
	latest := filepath.Join(directory, latestName)
	if err := files.Replace(latest, fmt.Append(nil, number)); err != nil {
		return err
	}
	return files.SyncFolder(directory)
}

// fillMegatron copies Megatron's files to a folder and writes the state into the copy. It reads the result as any other
// checkpoint before it is given its name.
func fillMegatron(ctx context.Context, c *checkpoint.Checkpoint, m *megatron, folder string,
	progress func(bytes int64)) error {
	if err := copyFolder(ctx, folder, m.path); err != nil {
		return err
	}
	out := &overwriter{folder: folder, kind: megatronKind, open: map[string]*os.File{}}
	defer out.close()
	if err := refill(ctx, c, out, m.ranks, m.weights, progress); err != nil {
		return err
	}
	for _, b := range m.used {
		if err := m.sumAgain(out, b); err != nil {
			return err
		}
	}
	if err := out.finish(); err != nil {
		return err
	}
	if err := setCommonStep(c, m, out); err != nil {
		return err
	}
	written := newMegatron(ctx, folder, nil)
	check, err := written.open()
	if err == nil && check.Step() != c.Step() {
		err = fmt.Errorf("its step is %d after it has been set to %d", check.Step(), c.Step())
	}
	return err
}

// setCommonStep writes the optimizer's step into the copy of common.pt.
func setCommonStep(c *checkpoint.Checkpoint, m *megatron, out *overwriter) error {
	if c.Step() == m.step {
		return nil
	}
	if m.commonIn != "" {
		return fmt.Errorf("its step is in %q, expected common.pt", m.commonIn)
	}
	return out.setSteps(filepath.Join(m.path, commonName), stepTensors, m.step, c.Step())
}

// stepTensors returns the steps of an optimizer, which are numbers or tensors.
func stepTensors(document any) []any {
	if all := pickle.Items(document); len(all) == 1 {
		document = all[0]
	}
	return allSteps(pickle.Member(document, "optimizer"))
}

// sumAgain sets the checksum of a tensor whose numbers have changed, in a copy of a file.
func (m *megatron) sumAgain(out *overwriter, b blob) error {
	file, err := out.file(b.file)
	if err != nil {
		return err
	}
	a := &archive{
		path: file.Name(), data: io.NewSectionReader(file, b.First, b.Count), base: b.First, size: b.Count,
		kind: m.kind,
	}
	document, err := a.document(m.inBlobs)
	if err != nil {
		return err
	}
	tensor, ok := document.(pickle.Tensor)
	if !ok {
		return fmt.Errorf("%s, expected a tensor", pickle.Shown(document))
	}
	return a.sumAgain(file, map[string]bool{tensor.Key: true})
}
