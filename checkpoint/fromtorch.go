package checkpoint

import (
	"archive/zip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"
	"strings"

	"plimsoll/dtype"
	"plimsoll/fault"
	"plimsoll/files"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
	"plimsoll/shard"
)

// maxPickle is far above the size of a document without numbers.
const maxPickle = 128 << 20

// torchPart is the part of all parameters of a file of torch.save.
const torchPart = "torch"

// OpenTorch opens a file that [Checkpoint.WriteTorch], or a program with torch.save,
// has written. The result is a checkpoint of one rank that can be converted. OpenTorch
// reads every number and verifies the archive's own checksums.
func OpenTorch(ctx context.Context, path string, progress func(bytes int64)) (*Checkpoint, error) {
	file, info, err := files.Open(path)
	if err != nil {
		return nil, cause(path, "expected a file of torch.save", errors.Unwrap(err))
	}
	defer file.Close()
	return readTorch(ctx, path, file, info.Size(), progress)
}

// readTorch is OpenTorch for a file that is open.
func readTorch(
	ctx context.Context, path string, data io.ReaderAt, size int64, progress func(bytes int64),
) (*Checkpoint, error) {
	t := &torchFile{path: path, data: data, size: size}
	if err := t.open(); err != nil {
		return nil, err
	}
	text, err := t.entry("data.pkl", maxPickle)
	if err != nil {
		return nil, err
	}
	document, err := unpickle(text)
	if err != nil {
		return nil, t.wrong("%v", err)
	}
	if err := t.understand(document); err != nil {
		return nil, t.wrong("%v", err)
	}
	c, err := t.checkpoint()
	if err != nil {
		return nil, t.wrong("%v", err)
	}
	return c, t.verify(ctx, progress)
}

// torchFile is a file of torch.save.
type torchFile struct {
	path    string
	data    io.ReaderAt // of the file, while it is open
	size    int64
	archive *zip.Reader
	prefix  string               // of the names of all entries
	entries map[string]*zip.File // by their names behind the prefix

	algorithm kernel.Algorithm
	step      int64
	pieces    []shard.Piece
	starts    []int64   // element of the shard at which each piece begins
	offsets   [][]int64 // of the master and the moments of each piece, in the file
}

func (t *torchFile) wrong(format string, arguments ...any) error {
	return fault.File(t.path).Inputf("this is no optimizer state: %s", fmt.Sprintf(format, arguments...)).
		WithHint(`write it with torch.save({"state": ..., "param_groups": ..., "names": ..., "master": ...}, FILE), ` +
			`as docs/checkpoints.md says`)
}

func (t *torchFile) open() error {
	archive, err := zip.NewReader(t.data, t.size)
	if err != nil {
		return t.wrong("%v", err)
	}
	t.archive, t.entries = archive, map[string]*zip.File{}
	if err := t.checkSizes(); err != nil {
		return err
	}
	for _, f := range archive.File {
		if prefix, ok := strings.CutSuffix(f.Name, "data.pkl"); ok {
			t.prefix = prefix
		}
	}
	for _, f := range archive.File {
		if name, ok := strings.CutPrefix(f.Name, t.prefix); ok {
			t.entries[name] = f
		}
	}
	if order, err := t.entry("byteorder", 16); err == nil && string(order) != "little" {
		return t.wrong("its numbers are %s-endian, expected little-endian", order)
	}
	return nil
}

// checkSizes checks the sizes of the entries against the size of the file: torch.save
// does not compress, and no two entries share bytes. So a file cannot claim to hold
// more bytes than it has.
func (t *torchFile) checkSizes() error {
	var sum uint64
	for _, f := range t.archive.File {
		size := f.UncompressedSize64
		if f.Method != zip.Store || size != f.CompressedSize64 {
			return t.wrong("%.60q in the archive is compressed, and torch.save does not compress", f.Name)
		}
		if size > uint64(t.size)-sum {
			return t.wrong("the entries of the archive have more bytes than the file, %d", t.size)
		}
		sum += size
	}
	return nil
}

// entry reads a small entry.
func (t *torchFile) entry(name string, limit uint64) ([]byte, error) {
	f := t.entries[name]
	if f == nil || f.UncompressedSize64 > limit {
		return nil, t.wrong("the archive has no %s, or one of more than %d bytes", name, limit)
	}
	r, err := f.Open()
	if err != nil {
		return nil, t.wrong("%s: %v", name, err)
	}
	defer r.Close()
	text := make([]byte, f.UncompressedSize64) // no more than the file has: see checkSizes
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, t.wrong("%s: %v", name, err)
	}
	return text, nil
}

// understand finds the parameters and their tensors in the document.
func (t *torchFile) understand(document any) error {
	groups, err := groupsOf(member(document, "param_groups"))
	if err != nil {
		return err
	}
	states, masters := byKey[int64](member(document, "state")), byKey[string](member(document, "master"))
	names := items(member(document, "names"))
	if len(names) == 0 {
		return errors.New(`it has no list "names" of the parameters`)
	}
	if len(names) < len(groups) {
		return fmt.Errorf(`it has %d "names", but %d parameters in "param_groups"`, len(names), len(groups))
	}
	for i, item := range names {
		name, isName := item.(string)
		group, isIn := groups[int64(i)]
		if !isName || !isIn {
			return fmt.Errorf("parameter %d, %s, has no name or is in no parameter group", i, shown(item))
		}
		if err := t.add(name, group, masters[name], states[int64(i)]); err != nil {
			return fmt.Errorf("parameter %q: %w", name, err)
		}
	}
	return nil
}

// byKey returns the values of a dict whose keys have a type, by key.
func byKey[K comparable](of any) map[K]any {
	values := map[K]any{}
	for _, e := range entries(of) {
		if key, ok := e.key.(K); ok {
			values[key] = e.value
		}
	}
	return values
}

// groupsOf returns the parameter group of each parameter.
func groupsOf(list any) (map[int64]int, error) {
	groups := map[int64]int{}
	for group, item := range items(list) {
		for _, item := range items(member(item, "params")) {
			number, ok := item.(int64)
			if _, twice := groups[number]; !ok || twice {
				return nil, fmt.Errorf("parameter %s of parameter group %d is no number, or is listed twice",
					shown(item), group)
			}
			groups[number] = group
		}
	}
	return groups, nil
}

// algorithmOf tells from the moments in a state which algorithm it is of. It returns their names, too.
func algorithmOf(state any) (a kernel.Algorithm, moments []string, err error) {
	for _, name := range kernel.AlgorithmNames() {
		a, _ = kernel.ParseAlgorithm(name) // is one
		moments = nil
		for _, s := range (kernel.Format{Algorithm: a}).MomentStreams() {
			moments = append(moments, string(s.Component))
		}
		if !slices.ContainsFunc(moments, func(m string) bool { return member(state, m) == nil }) {
			return a, moments, nil
		}
	}
	return a, nil, errors.New(`its "state" has no moments of Adam, Lion, Adagrad or SGD`)
}

// maxStateMembers is far above the number of members that any optimizer has. All members
// are read for each parameter, and parameters may share a state in the file.
const maxStateMembers = 64

// add adds a parameter: its master weights and its optimizer state.
func (t *torchFile) add(name string, group int, master, state any) error {
	algorithm, moments, err := algorithmOf(state)
	if err != nil {
		return err
	}
	if n := len(entries(state)); n > maxStateMembers {
		return fmt.Errorf(`its "state" has %d members, expected at most %d`, n, maxStateMembers)
	}
	if foreign := foreignTo(moments, state); foreign != "" {
		return fmt.Errorf(`its "state" has %s, which plimsoll's %v does not have: this is another optimizer`,
			foreign, algorithm)
	}
	weights, ok := master.(torchTensor)
	if !ok {
		return errors.New(`it has no tensor in "master"`)
	}
	p := shard.Piece{Name: name, Shape: weights.shape, Group: group}
	if p.Count, err = p.Elements(); err != nil || p.Count == 0 { // no shard has an empty piece
		return err
	}
	offsets := make([]int64, 1+len(moments))
	if offsets[0], err = t.locate(weights, p); err != nil {
		return fmt.Errorf("master: %w", err)
	}
	for m, component := range moments {
		tensor, ok := member(state, component).(torchTensor)
		if !ok {
			return fmt.Errorf("%s is no tensor", component)
		}
		if offsets[1+m], err = t.locate(tensor, p); err != nil {
			return fmt.Errorf("%s: %w", component, err)
		}
	}
	step, err := t.stepOf(algorithm, member(state, "step"))
	if err != nil {
		return err
	}
	if len(t.pieces) > 0 && (algorithm != t.algorithm || step != t.step) {
		return fmt.Errorf("it has the state of %v at step %d, but earlier parameters have the state of %v at step %d",
			algorithm, step, t.algorithm, t.step)
	}
	t.algorithm, t.step = algorithm, step
	t.pieces, t.offsets = append(t.pieces, p), append(t.offsets, offsets)
	return nil
}

// locate returns where the numbers of a tensor begin in the file.
func (t *torchFile) locate(tensor torchTensor, p shard.Piece) (int64, error) {
	if tensor.kind != "FloatStorage" {
		return 0, fmt.Errorf("a tensor with a %s, expected fp32 in a FloatStorage", tensor.kind)
	}
	if !slices.Equal(tensor.shape, p.Shape) || !contiguous(tensor) {
		return 0, fmt.Errorf("a tensor of shape %v with strides %v, expected a contiguous one of shape %v",
			tensor.shape, tensor.strides, p.Shape)
	}
	f := t.entries["data/"+tensor.key]
	if f == nil {
		return 0, fmt.Errorf("the archive has no data/%s", tensor.key)
	}
	if size := f.UncompressedSize64; int64(size)/4-tensor.offset < p.Count {
		return 0, fmt.Errorf("data/%s has %d bytes, too few for %d numbers from %d on",
			tensor.key, size, p.Count, tensor.offset)
	}
	at, err := f.DataOffset()
	return at + 4*tensor.offset, err
}

func contiguous(t torchTensor) bool {
	if len(t.strides) != len(t.shape) {
		return false
	}
	want := int64(1)
	for i := len(t.shape) - 1; i >= 0; i-- {
		if t.shape[i] != 1 && t.strides[i] != want {
			return false
		}
		want *= t.shape[i] // a validated shape does not overflow
	}
	return true
}

// foreignTo returns a member that a state has beside the moments, or "". It belongs to
// another optimizer and would be lost. Master weights may be in the state: Plimsoll's
// states have them, and the file also has them by name.
func foreignTo(moments []string, state any) string {
	for _, e := range entries(state) {
		name := shown(e.key)
		if key, ok := e.key.(string); ok {
			name = key
		}
		if e.value != nil && !slices.Contains(moments, name) && name != "step" && name != string(ledger.MasterWeights) {
			return name
		}
	}
	return ""
}

// stepOf returns the step of a parameter. SGD and Lion count no steps. If there is a
// moment, the first step is over, which is a special one of SGD.
func (t *torchFile) stepOf(algorithm kernel.Algorithm, step any) (int64, error) {
	var number float64
	switch s := step.(type) {
	case nil:
		if algorithm != kernel.SGD && algorithm != kernel.Lion {
			return 0, fmt.Errorf("it has no step, which %v needs", algorithm)
		}
		number = 1
	case int64:
		number = float64(s)
	case float64:
		number = s
	case torchTensor:
		at, err := t.locate(s, shard.Piece{Shape: s.shape, Range: shard.Range{Count: 1}})
		if err != nil || len(s.shape) != 0 {
			return 0, fmt.Errorf("its step is no number: %w", err)
		}
		var bytes [4]byte
		if _, err := t.data.ReadAt(bytes[:], at); err != nil {
			return 0, err
		}
		number = float64(math.Float32frombits(binary.LittleEndian.Uint32(bytes[:])))
	default:
		return 0, fmt.Errorf("its step is %s, expected a number", shown(step))
	}
	if !(number >= 0 && number <= 1<<53) || number != math.Trunc(number) {
		return 0, fmt.Errorf("its step is %v, expected a whole number", number)
	}
	return int64(number), nil
}

// checkpoint returns the file as a checkpoint of one rank, with everything in fp32.
func (t *torchFile) checkpoint() (*Checkpoint, error) {
	if len(t.pieces) == 0 {
		return nil, errors.New("it has no parameters")
	}
	format := kernel.Format{Algorithm: t.algorithm, State: kernel.FP32, Parameter: dtype.BF16, Gradient: dtype.BF16}
	l, err := layoutOfPieces(format, t.pieces)
	if err != nil {
		return nil, err
	}
	at := int64(0)
	for _, p := range t.pieces {
		t.starts = append(t.starts, at)
		at += p.Count
	}
	m := newManifest(Shard{World: 1, Part: torchPart, Format: format}, l, t.step, nil, nil)
	return assembleShards(folder{path: t.path, step: m.Step, world: m.World},
		[]savedFile{&file{path: t.path, manifest: m, layout: l, torch: t}})
}

// read reads elements of a stream of the shard.
func (t *torchFile) read(file io.ReaderAt, role kernel.Role, first int64, b []byte) error {
	stream := 0
	if role != kernel.MasterRole {
		stream = 1 + int(role-kernel.FirstMomentRole)
	}
	for i := sort.Search(len(t.starts), func(i int) bool { return t.starts[i] > first }) - 1; len(b) > 0; i++ {
		skip := first - t.starts[i]
		n := min(int64(len(b)), 4*(t.pieces[i].Count-skip))
		if _, err := file.ReadAt(b[:n], t.offsets[i][stream]+4*skip); err != nil {
			return cutShort(t.path, err)
		}
		first += n / 4
		b = b[n:]
	}
	return nil
}

// verify verifies the archive's checksums of all entries.
func (t *torchFile) verify(ctx context.Context, progress func(bytes int64)) error {
	buffer := make([]byte, 1<<20)
	for _, f := range t.archive.File {
		r, err := f.Open()
		if err != nil {
			return t.wrong("%s: %v", f.Name, err)
		}
		for {
			n, err := r.Read(buffer)
			if progress != nil {
				progress(int64(n))
			}
			if err == io.EOF {
				break
			}
			if err != nil {
				return broken(t.path, "damaged: %s: %v", f.Name, err)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		if err := r.Close(); err != nil {
			return err
		}
	}
	return nil
}
