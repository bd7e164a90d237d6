package checkpoint

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/states"
)

// A checkpoint of states has the same files as one of shards: for each rank and part a safetensors file, and a manifest
// with checksums. The tensors are the states as they rest in host memory, under names such as "layer.weight.exp_avg".

// statesManifest describes the file of a rank's states.
type statesManifest struct {
	manifestHead
	Bytes     int64            `json:"bytes"` // of the safetensors file
	Header    int64            `json:"header_bytes"`
	HeaderSum checksums        `json:"header_crc32c"`
	Block     int64            `json:"block_bytes"` // that a checksum is of
	Tensors   []tensorDocument `json:"tensors"`     // in the order of the data
	Training  jsontext.Value   `json:"training,omitzero"`
}

type tensorDocument struct {
	Name  string     `json:"name"`
	Type  dtype.Type `json:"dtype"`
	Shape []int64    `json:"shape"`
	Sums  checksums  `json:"crc32c"` // of its blocks, in order

	offset int64 // in the data
}

// sumBlock is how many bytes of a tensor have a checksum.
const sumBlock = 1 << 20

func (t *tensorDocument) bytes() int64 { return states.Tensor{Type: t.Type, Shape: t.Shape}.Bytes() }

func (t *tensorDocument) blocks(block int64) int64 { return (t.bytes() + block - 1) / block }

// place sets where the tensors lie: one behind the other, those with the widest elements first, so that all are
// aligned. It returns the bytes of all.
func place(tensors []tensorDocument) int64 {
	slices.SortStableFunc(tensors, func(a, b tensorDocument) int { return cmp.Compare(b.Type.Size(), a.Type.Size()) })
	end := int64(0)
	for i := range tensors {
		tensors[i].offset = end
		end += tensors[i].bytes()
	}
	return end
}

// tensorsOf returns the tensors of a file for states, with room for their checksums. A scalar is a tensor without
// dimensions.
func tensorsOf(chunks []states.Chunk) []tensorDocument {
	var tensors []tensorDocument
	for _, c := range chunks {
		for _, t := range c.Tensors {
			shape := append([]int64{}, t.Shape...) // [] in JSON, also without dimensions
			tensors = append(tensors, tensorDocument{Name: t.Title(), Type: t.Type, Shape: shape})
		}
		for _, s := range c.Scalars {
			tensors = append(tensors, tensorDocument{Name: s.Title(), Type: s.Type, Shape: []int64{}})
		}
	}
	place(tensors)
	for i := range tensors {
		tensors[i].Sums = make(checksums, tensors[i].blocks(sumBlock))
	}
	return tensors
}

// headerOf returns the tensors as the header of a safetensors file has them.
func headerOf(tensors []tensorDocument) []tensor {
	var list []tensor
	for _, t := range tensors {
		list = append(list, tensor{t.Name, safetensorsName(t.Type), t.Shape, [2]int64{t.offset, t.offset + t.bytes()}})
	}
	return list
}

// statesFile is the file of a rank's states.
type statesFile struct {
	path     string // of the safetensors file
	manifest *statesManifest
	byName   map[string]*tensorDocument
}

func (f *statesFile) of() *manifestHead { return f.manifest.of() }

func (f *statesFile) name() string { return f.path }

func (f *statesFile) size() int64 { return f.manifest.Bytes }

func (f *statesFile) training() jsontext.Value { return f.manifest.Training }

// readStates reads the manifest of a rank's states.
func readStates(path string, text []byte) (savedFile, error) {
	f := &statesFile{path: path, manifest: &statesManifest{}, byName: map[string]*tensorDocument{}}
	if err := unseal(text, f.manifest); err != nil {
		return nil, err
	}
	return f, f.check()
}

// check refuses a manifest that describes no file.
func (f *statesFile) check() error {
	m := f.manifest
	if err := validateName(m.Rank, m.World, m.Part); err != nil {
		return err
	}
	total := int64(0)
	for i := range m.Tensors {
		t := &m.Tensors[i]
		if err := states.CheckTensor(t.Name, t.Type, t.Shape); err != nil {
			return err
		}
		if f.byName[t.Name] != nil {
			return fmt.Errorf("%q is listed twice", t.Name)
		}
		f.byName[t.Name] = t
		if i > 0 && t.Type.Size() > m.Tensors[i-1].Type.Size() {
			return fmt.Errorf("%q has wider elements than %q, which comes before", t.Name, m.Tensors[i-1].Name)
		}
		if total += t.bytes(); total > states.MaximumBytes {
			return fmt.Errorf("the tensors have more than %d bytes", int64(states.MaximumBytes))
		}
		if m.Block < 1 || int64(len(t.Sums)) != t.blocks(m.Block) {
			return fmt.Errorf("%q of %d bytes has %d checksums of %d bytes", t.Name, t.bytes(), len(t.Sums), m.Block)
		}
	}
	if m.Step < 1 || m.Step > states.MaximumSteps || m.Header < 8 || m.Header > maxHeader+8 || len(m.HeaderSum) != 1 ||
		m.Bytes != m.Header+total {
		return fmt.Errorf("step %d, a header of %d bytes with %d checksums and a file of %d bytes for tensors of %d",
			m.Step, m.Header, len(m.HeaderSum), m.Bytes, total)
	}
	place(m.Tensors) // they are in this order already
	return nil
}

// States is a complete checkpoint of states. None of its data has been read.
type States struct {
	folder
	files []*statesFile // in the order of parts, and ranks in each
}

func assembleStates(own folder, files []savedFile) (*States, error) {
	c := &States{folder: own}
	for _, f := range files {
		c.files = append(c.files, f.(*statesFile))
	}
	return c, nil
}

// Files returns the safetensors files, with the elements of all tensors.
func (c *States) Files() []StatesFile {
	var list []StatesFile
	for _, f := range c.files {
		file := StatesFile{Name: filepath.Base(f.path), Rank: f.manifest.Rank, Part: f.manifest.Part,
			Bytes: ledger.Bytes(f.manifest.Bytes)}
		for _, t := range f.manifest.Tensors {
			file.Tensors = append(file.Tensors, StatesTensor{t.Name, t.Type, t.Shape, ledger.Bytes(t.bytes())})
		}
		list = append(list, file)
	}
	return list
}

// StatesFile is a file of a checkpoint of states.
type StatesFile struct {
	Name    string
	Rank    int
	Part    string
	Tensors []StatesTensor
	Bytes   ledger.Bytes
}

// StatesTensor is a tensor of a checkpoint of states.
type StatesTensor struct {
	Name  string
	Type  dtype.Type
	Shape []int64
	Bytes ledger.Bytes
}

// find returns the file in which a rank finds a tensor: its own or, if all files with the name have the same bytes, as
// ranks that hold copies of one state save them, the first of these.
func (c *States) find(name string, rank, world int, part string) (*statesFile, error) {
	var found []*statesFile
	for _, f := range c.files {
		if f.byName[name] == nil || f.manifest.Part != part {
			continue
		}
		if f.manifest.Rank == rank && c.world == world {
			return f, nil
		}
		found = append(found, f)
	}
	switch len(found) {
	case 0:
		e := c.unsuitable("it has no tensor %q in part %s", name, part)
		e.Hint = c.hint(name, part)
		return nil, e
	case 1:
		return found[0], nil
	}
	if slices.ContainsFunc(found[1:], func(f *statesFile) bool { return !sameBytes(found[0], f, name) }) {
		return nil, c.unsuitable("it is of %d ranks, and %d of them have %q, each with other numbers, so that nothing "+
			"tells which of these rank %d of %d needs", c.world, len(found), name, rank, world)
	}
	return found[0], nil
}

// sameBytes reports whether two files have the same tensor, by its checksums.
func sameBytes(a, b *statesFile, name string) bool {
	one, other := a.byName[name], b.byName[name]
	return one.Type == other.Type && slices.Equal(one.Shape, other.Shape) &&
		a.manifest.Block == b.manifest.Block && slices.Equal(one.Sums, other.Sums)
}

// hint says where a tensor is that a part lacks: in the part of another optimizer, or under a similar name.
func (c *States) hint(name, part string) string {
	for _, f := range c.files {
		if f.byName[name] != nil {
			return fmt.Sprintf("part %s has it: %s", f.manifest.Part, saidOf(f.manifest.Part, part))
		}
	}
	if nearest := fault.NearestParameter(name, c.names(part)); nearest != "" {
		return fmt.Sprintf("it has %q", nearest)
	}
	return ""
}

// saidOf says which name the optimizer had that saved a part. The Python client makes parts of names.
func saidOf(saved, wanted string) string {
	name, isNamed := strings.CutSuffix(saved, ".states")
	switch {
	case isNamed:
		return fmt.Sprintf("the optimizer that saved it had name=%q; give this one the same name", name)
	case saved == "states":
		return fmt.Sprintf("the optimizer that saved it had no name; make this one without its name %q",
			strings.TrimSuffix(wanted, ".states"))
	}
	return "give this optimizer the name of the one that saved it"
}

func (c *States) names(part string) []string {
	var names []string
	for _, f := range c.files {
		if f.manifest.Part == part {
			names = slices.AppendSeq(names, maps.Keys(f.byName))
		}
	}
	slices.Sort(names)
	return names
}

func (c *States) unsuitable(format string, arguments ...any) *fault.Input {
	return fault.File(c.path).Inputf("the checkpoint is of another training: %s", fmt.Sprintf(format, arguments...))
}
