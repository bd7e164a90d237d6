package checkpoint

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"plimsoll/fault"
	"plimsoll/files"
	"plimsoll/optim/kernel"
)

// A checkpoint of Megatron has its arguments, schedule and random states, which Plimsoll does not have. So the job that
// shall go on saves one itself, and the state is written in a copy of it: each number where Megatron's own number was.

var iterationFolder = regexp.MustCompile(`^iter_(\d{7})$`)

// WriteMegatron writes the checkpoint as one of Megatron's dist_checkpointing. It is a folder in the directory, and a
// file there names it. like is a checkpoint of the job that shall load it: all but weights, moments and the optimizer's
// step are taken from there. Memory does not grow with the state.
func (c *Checkpoint) WriteMegatron(
	ctx context.Context, directory, like string, progress func(bytes int64),
) error {
	like, err := latestIteration(like)
	if err == nil {
		err = checkBackend(like)
	}
	if err != nil {
		return err
	}
	name := fmt.Sprintf("iter_%07d", c.step)
	if iterationFolder.MatchString(filepath.Base(like)) {
		name = filepath.Base(like)
	}
	m := newMegatron(ctx, like, nil)
	m.weights = map[string]numbers{}
	defer m.close()
	template, err := m.open()
	if err == nil {
		err = c.checkTemplate(template)
	}
	if err != nil {
		return inputOf(megatronKind, like, err)
	}
	err = writeFolder(filepath.Join(directory, name), func(folder string) error {
		return c.fillMegatron(ctx, m, folder, progress)
	})
	if err != nil {
		return err
	}
	number, _ := strconv.Atoi(name[len("iter_"):]) // digits
	latest := filepath.Join(directory, latestName)
	if err := files.Replace(latest, fmt.Append(nil, number)); err != nil {
		return err
	}
	return syncFolder(directory)
}

// checkTemplate refuses a checkpoint that has other parameters.
func (c *Checkpoint) checkTemplate(like *Checkpoint) error {
	if c.Algorithm() != kernel.Adam {
		return fault.File(c.path).Inputf("it is the state of %v, and Megatron's is read of Adam only", c.Algorithm()).
			WithHint("use --to torch")
	}
	for _, name := range like.names {
		own := c.parameters[name]
		if own == nil {
			return fmt.Errorf("it has the parameter %q, which the checkpoint %s does not have", name, c.path)
		}
		if shape := like.parameters[name].Shape; !slices.Equal(own.Shape, shape) {
			return fmt.Errorf("parameter %q has the shape %v, and in the checkpoint %v", name, shape, own.Shape)
		}
	}
	for _, name := range c.names {
		if like.parameters[name] == nil {
			return fault.File(c.path).Inputf("parameter %q is not in the checkpoint that is to be like it", name)
		}
	}
	return nil
}

// fillMegatron copies Megatron's files to a folder and writes the state into the copy. It reads the result as any other
// checkpoint before it is given its name.
func (c *Checkpoint) fillMegatron(ctx context.Context, m *megatron, folder string, progress func(bytes int64)) error {
	if err := copyFolder(ctx, folder, m.path); err != nil {
		return err
	}
	out := &overwriter{folder: folder, open: map[string]*os.File{}}
	defer out.close()
	for _, f := range m.ranks {
		for i, p := range f.pieces {
			places := slices.Clone(f.places[i])
			roles := []kernel.Role{kernel.MasterRole, kernel.FirstMomentRole, kernel.SecondMomentRole}
			if w := m.weights[p.Name]; w != nil {
				places, roles = append(places, w), append(roles, kernel.MasterRole)
			}
			for number, role := range roles {
				to, ok := places[number].(stored)
				if !ok {
					return fmt.Errorf("parameter %q: its numbers are not in a file as they are", p.Name)
				}
				w := &placeWriter{overwriter: out, to: to, halves: isHalves(places[number])}
				if err := c.export(ctx, c.parameters[p.Name].Piece, role, w, progress); err != nil {
					return err
				}
			}
		}
	}
	for _, b := range m.used {
		if err := m.sumAgain(out, b); err != nil {
			return err
		}
	}
	if err := out.finish(); err != nil {
		return err
	}
	if err := c.setCommonStep(m, folder); err != nil {
		return err
	}
	written := newMegatron(ctx, folder, nil)
	check, err := written.open()
	if err == nil && check.step != c.step {
		err = fmt.Errorf("its step is %d after it has been set to %d", check.step, c.step)
	}
	return err
}

// copyFolder copies the files of a folder.
func copyFolder(ctx context.Context, to, from string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		source, _, err := files.Open(filepath.Join(from, e.Name()))
		if err != nil {
			return cause(filepath.Join(from, e.Name()), "it cannot be copied", errors.Unwrap(err))
		}
		err = writeNew(filepath.Join(to, e.Name()), func(w io.Writer) error {
			_, err := io.Copy(w, source)
			return err
		})
		if err := errors.Join(err, source.Close()); err != nil {
			return err
		}
	}
	return nil
}

// overwriter writes into files of a folder that are complete but for their numbers.
type overwriter struct {
	folder string
	open   map[string]*os.File // by the names in the folder
}

// file returns the file that is the copy of one elsewhere.
func (o *overwriter) file(path string) (*os.File, error) {
	name := filepath.Base(path)
	if file := o.open[name]; file != nil {
		return file, nil
	}
	if len(o.open) >= maxOpen {
		if err := o.finish(); err != nil {
			return nil, err
		}
	}
	file, _, err := files.OpenFile(filepath.Join(o.folder, name), os.O_RDWR, 0)
	if err == nil {
		o.open[name] = file
	}
	return file, err
}

// finish brings the files to the disk.
func (o *overwriter) finish() error {
	var err error
	for _, file := range o.open {
		err = errors.Join(err, file.Sync())
	}
	return errors.Join(err, o.close())
}

func (o *overwriter) close() error {
	var err error
	for name, file := range o.open {
		err = errors.Join(err, file.Close())
		delete(o.open, name)
	}
	return err
}

// placeWriter writes fp32 numbers, one after the other, to their places. halves are rounded to bf16.
type placeWriter struct {
	*overwriter
	to     stored
	next   int64 // number
	halves bool

	rounded []byte // a buffer
}

func (w *placeWriter) Write(b []byte) (int, error) {
	count, width, text := int64(len(b))/4, int64(4), b
	if w.halves {
		w.rounded = roundToBF16(w.rounded[:0], b)
		width, text = 2, w.rounded
	}
	err := w.to.spans(w.next, count, func(at location, n int64) error {
		file, err := w.file(at.path)
		if err != nil {
			return err
		}
		_, err = file.WriteAt(text[:width*n], at.offset)
		text = text[width*n:]
		return err
	})
	w.next += count
	return len(b), err
}

// isHalves tells whether numbers take two bytes.
func isHalves(n numbers) bool {
	switch n := n.(type) {
	case section:
		return isHalves(n.numbers)
	case grid:
		return n.width == 2
	}
	return false
}

// roundToBF16 appends fp32 numbers, rounded to nearest even as PyTorch does. It keeps NaN.
func roundToBF16(halves, b []byte) []byte {
	halves = slices.Grow(halves, len(b)/2)
	for i := 0; i < len(b); i += 4 {
		bits := binary.LittleEndian.Uint32(b[i:])
		if number := math.Float32frombits(bits); number != number {
			bits = 0x7fc0_0000
		} else {
			bits += 0x7fff + bits>>16&1
		}
		halves = binary.LittleEndian.AppendUint16(halves, uint16(bits>>16))
	}
	return halves
}

// setCommonStep writes the optimizer's step into the copy of common.pt.
func (c *Checkpoint) setCommonStep(m *megatron, folder string) error {
	if c.step == m.step {
		return nil
	}
	if m.commonIn != "" {
		return fmt.Errorf("its step is in %q, expected common.pt", m.commonIn)
	}
	path := filepath.Join(folder, commonName)
	return withArchive(m.ctx, path, megatronKind, anyClass, nil, func(a *archive, document any) error {
		steps, numbers := stepTensors(document), 0
		for _, s := range steps {
			if tensor, ok := s.(torchTensor); ok {
				if err := overwriteStep(path, a, tensor, c.step); err != nil {
					return err
				}
			} else {
				numbers++
			}
		}
		if numbers == 0 {
			return nil
		}
		text, err := a.entry("data.pkl", maxPickle)
		if err != nil {
			return err
		}
		if text, err = spliceSteps(text, numbers, m.step, c.step); err != nil {
			return err
		}
		return a.replacePickle(path, text)
	})
}

// overwriteStep writes a step that is a tensor.
func overwriteStep(path string, a *archive, tensor torchTensor, step int64) error {
	at, err := a.locate(tensor, nil)
	if err != nil {
		return err
	}
	out := &overwriter{folder: filepath.Dir(path), open: map[string]*os.File{}}
	defer out.close()
	file, err := out.file(path)
	if err == nil {
		_, err = file.WriteAt(stepBytes(step), at.offset)
	}
	if err == nil {
		err = a.sumAgain(file, tensor)
	}
	return errors.Join(err, out.finish())
}

// stepTensors returns the steps of an optimizer, which are numbers or tensors.
func stepTensors(document any) []any {
	if all := items(document); len(all) == 1 {
		document = all[0]
	}
	return allSteps(member(document, "optimizer"))
}

// stepKeys are the names of steps in the pickle of an optimizer.
var stepKeys = []string{"step", "common_step"}

// spliceSteps replaces steps that are numbers in a pickle: as many as there are, all of one value. Nothing else of the
// pickle changes, whatever it has.
func spliceSteps(text []byte, count int, from, to int64) ([]byte, error) {
	places, err := findSteps(text)
	if err != nil {
		return nil, err
	}
	if len(places) != count {
		return nil, fmt.Errorf("%d numbers are named step in it, expected the %d of the optimizer", len(places), count)
	}
	var spliced []byte
	done := 0
	for _, p := range places {
		if p.value != float64(from) {
			return nil, fmt.Errorf("a step in it is %v, expected %d", p.value, from)
		}
		spliced = append(spliced, text[done:p.begin]...)
		var d pickler
		if p.isFloat {
			d.value(float64(to))
		} else {
			d.int(to)
		}
		spliced = append(spliced, d.Bytes()...)
		done = p.end
	}
	return append(spliced, text[done:]...), nil
}

// stepPlace is where a number is in a pickle.
type stepPlace struct {
	begin, end int
	value      float64
	isFloat    bool
}

// findSteps finds the numbers that stand behind the name of a step.
func findSteps(text []byte) ([]stepPlace, error) {
	u := &unpickler{text: text, memo: map[uint32]any{}, left: math.MaxInt64}
	named := map[uint32]bool{} // objects of the memo that are such a name
	isName, number := false, uint32(0)
	var places []stepPlace
	for {
		begin := len(text) - len(u.text)
		opcode, operand, err := u.skip()
		switch {
		case err != nil:
			return nil, err
		case opcode == opStop[0]:
			return places, nil
		}
		wasName := isName
		isName = false
		switch opcode {
		case 'X', '\x8c':
			isName = slices.Contains(stepKeys, string(operand))
		case 'q', 'r': // behind a name, it stays the last object
			isName = wasName
			if number = littleEndian(operand); wasName {
				named[number] = true
			} else {
				delete(named, number)
			}
		case '\x94':
			return nil, errors.New("it is not of protocol 2, as torch.save writes it")
		case 'h', 'j':
			isName = named[littleEndian(operand)]
		case 'K', 'M', 'J', '\x8a', 'G':
			if wasName {
				p := stepPlace{begin: begin, end: len(text) - len(u.text), isFloat: opcode == 'G'}
				if p.value, err = literalAt(text[begin:p.end]); err != nil {
					return nil, err
				}
				places = append(places, p)
			}
		}
	}
}

// literalAt returns the number that an opcode pushes.
func literalAt(text []byte) (float64, error) {
	u := &unpickler{text: text[1:], left: math.MaxInt64}
	if err := u.literal(text[0]); err != nil {
		return 0, err
	}
	switch number := u.stack[0].(type) {
	case int64:
		return float64(number), nil
	case float64:
		return number, nil
	}
	return 0, errors.New("a step that is no number")
}

// replacePickle writes the archive again, with another pickle.
func (a *archive) replacePickle(path string, pickle []byte) error {
	file, err := files.NewPending(path)
	if err != nil {
		return err
	}
	defer file.Cleanup()
	buffer := bufio.NewWriter(file)
	w := newArchiveWriter(buffer)
	err = w.entry("data.pkl", pickle)
	for name, entry := range a.entries {
		if err == nil && name != "data.pkl" {
			var from io.ReadCloser
			if from, err = entry.Open(); err == nil {
				var to io.Writer
				if to, err = w.create(name); err == nil {
					_, err = io.Copy(to, from)
				}
				err = errors.Join(err, from.Close())
			}
		}
	}
	if err == nil {
		err = w.zip.Close()
	}
	if err == nil {
		err = buffer.Flush()
	}
	if err != nil {
		return err
	}
	return file.CloseAtomicallyReplace()
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
	tensor, ok := document.(torchTensor)
	if !ok {
		return fmt.Errorf("%s, expected a tensor", shown(document))
	}
	return a.sumAgain(file, tensor)
}

// Places of checksums in an archive: in the entry's header, in the directory and in the descriptor behind the entry.
const (
	directoryEntry = "PK\x01\x02"
	inHeader       = 14
	inDirectory    = 16
	headerPlace    = 42 // of the entry, in the directory
	directoryFixed = 46
)

// sumAgain sets the checksum of a tensor's storage, whose numbers have changed.
func (a *archive) sumAgain(file *os.File, tensor torchTensor) error {
	f := a.entries["data/"+tensor.key]
	begin, err := f.DataOffset()
	if err != nil {
		return err
	}
	size := int64(f.UncompressedSize64)
	sum := crc32.NewIEEE()
	if _, err := io.Copy(sum, io.NewSectionReader(a.data, begin, size)); err != nil {
		return err
	}
	end := int64(0) // of the last entry: the directory is behind it
	for _, other := range a.zip.File {
		at, err := other.DataOffset()
		if err != nil {
			return err
		}
		end = max(end, at+int64(other.UncompressedSize64))
	}
	tail := make([]byte, a.size-end)
	if _, err := a.data.ReadAt(tail, end); err != nil {
		return err
	}
	places := []int64{begin + size, begin + size + 4} // a descriptor, with or without a signature
	at := bytes.Index(tail, []byte(directoryEntry))
	for at >= 0 && at+directoryFixed <= len(tail) && string(tail[at:at+4]) == directoryEntry {
		own := tail[at:]
		name := int(binary.LittleEndian.Uint16(own[28:]))
		extra, comment := int(binary.LittleEndian.Uint16(own[30:])), int(binary.LittleEndian.Uint16(own[32:]))
		if directoryFixed+name <= len(own) && string(own[directoryFixed:directoryFixed+name]) == f.Name {
			header := int64(binary.LittleEndian.Uint32(own[headerPlace:]))
			places = append(places, end+int64(at+inDirectory), header+inHeader)
		}
		at += directoryFixed + name + extra + comment
	}
	for _, place := range places {
		var old [4]byte
		if _, err := a.data.ReadAt(old[:], place); err != nil || binary.LittleEndian.Uint32(old[:]) != f.CRC32 {
			continue // there is no checksum here
		}
		if _, err := file.WriteAt(binary.LittleEndian.AppendUint32(nil, sum.Sum32()), a.base+place); err != nil {
			return err
		}
	}
	return nil
}
