package model

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
)

// A safetensors file is the length of its header (8 bytes, little-endian), the
// header (JSON: name -> dtype, shape, data_offsets), and the data. The checks
// are those of the reference implementation
// (https://github.com/huggingface/safetensors, safetensors/src/tensor.rs).

var (
	headerSchema = strict.Schema{Program: "safetensors", Rule: strict.Map(strict.Object(
		strict.Text().For("dtype"),
		strict.List(strict.Integer().Digits().From(0)).For("shape data_offsets")).AndOthers(),
		strict.Rule{}.For("__metadata__"))}
	indexSchema = strict.Schema{Program: "transformers", Rule: strict.Object(
		strict.Map(strict.Text()).For("weight_map")).AndOthers()}
)

// maxHeader is the reference implementation's limit.
const maxHeader = 100_000_000

// tensor is an entry of a header. The field at is its offset in the header.
type tensor struct {
	name       string
	dtype      dtype.Type
	shape      []int64
	begin, end int64
	at         int64
}

// SavedTensor is a tensor in a safetensors file.
type SavedTensor struct {
	Name   string
	Type   dtype.Type
	Shape  []int64
	Offset int64 // in the file
}

// SavedTensors returns the tensors of a safetensors file, in the order of its data.
func SavedTensors(path string) ([]SavedTensor, error) {
	doc, tensors, err := readHeader(path)
	if err != nil {
		return nil, err
	}
	saved := make([]SavedTensor, len(tensors))
	for i, t := range tensors {
		saved[i] = SavedTensor{t.name, t.dtype, t.shape, 8 + int64(len(doc.Text)) + t.begin}
	}
	return saved, nil
}

func loadSafetensors(path, name string) (*Model, error) {
	if part := partName.FindStringSubmatch(filepath.Base(path)); part != nil && part[1] != "00001" {
		return nil, fault.File(path).Inputf("this file is one of several that hold the model together").
			WithHint("name the folder, or the " + indexName + " beside it")
	}
	doc, tensors, err := readHeader(path)
	if err != nil {
		return nil, err
	}
	return fromTensors([]shard{{doc, tensors}}, name, path)
}

// partName matches transformers' name of one of a model's files. The group is
// the number of files.
var partName = lazyregexp.New(`-\d{5}-of-(\d{5})\.safetensors$`)

// readHeader reads the header of a file, without its data.
func readHeader(path string) (*strict.Document, []tensor, error) {
	fail := func(format string, arguments ...any) (*strict.Document, []tensor, error) {
		return nil, nil, fault.File(path).Inputf(format, arguments...).WithHint("download the file again")
	}
	file, info, err := files.Open(path)
	if err != nil {
		return nil, nil, unreadable(path, err)
	}
	defer file.Close()
	var prefix [8]byte
	if _, err := io.ReadFull(file, prefix[:]); err != nil {
		return fail("not a safetensors file: it has %d bytes, but the length of the header takes 8", info.Size())
	}
	length := binary.LittleEndian.Uint64(prefix[:])
	if length > maxHeader {
		return fail("not a safetensors file: the header would have %d bytes, expected at most %d",
			length, maxHeader)
	}
	data := info.Size() - 8 - int64(length)
	if data < 0 {
		return fail("the header has %d bytes, but the file ends after %d of them", length, info.Size()-8)
	}
	header := make([]byte, length)
	if _, err := io.ReadFull(file, header); err != nil {
		return nil, nil, unreadable(path, err)
	}
	doc, err := strict.ParseJSON(path, header)
	if err != nil {
		return nil, nil, err
	}
	tensors, err := parseHeader(doc, data)
	return doc, tensors, err
}

// parseHeader returns the tensors of a header in the order of the data. They
// must fill the data without gap or overlap. Positions count within the header.
func parseHeader(doc *strict.Document, data int64) ([]tensor, error) {
	if _, err := headerSchema.Read(doc); err != nil {
		return nil, err
	}
	tensors := []tensor{}
	for _, member := range doc.Root.Members {
		if member.Name == "__metadata__" {
			continue
		}
		t, err := parseTensor(doc, member)
		if err != nil {
			return nil, err
		}
		tensors = append(tensors, t)
	}
	slices.SortFunc(tensors, func(a, b tensor) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end))
	})
	var filled int64
	for _, t := range tensors {
		if t.begin != filled {
			return nil, doc.Inputf(t.at,
				"tensor %q starts at byte %d of the data, but the tensor before it ends at %d", t.name, t.begin, filled)
		}
		filled = t.end
	}
	if filled != data {
		return nil, doc.Inputf(0, "the tensors take %d bytes, but the file has %d after its header", filled, data).
			WithHint("download the file again")
	}
	return tensors, nil
}

func parseTensor(doc *strict.Document, member strict.Member) (tensor, error) {
	t := tensor{name: member.Name, at: member.Value.At}
	fail := func(at int64, format string, arguments ...any) (tensor, error) {
		return t, doc.Inputf(at, "tensor %q: "+format, slices.Insert(arguments, 0, any(t.name))...)
	}
	var offsets []int64
	for _, field := range member.Value.Members {
		switch field.Name {
		case "dtype":
			var err error
			if t.dtype, err = dtype.Parse(field.Value.Text); err != nil {
				return fail(field.Value.At, "unknown element type %s", field.Value)
			}
		case "shape":
			t.shape = sizes(field.Value)
		case "data_offsets":
			offsets = sizes(field.Value)
		}
	}
	if t.dtype == dtype.Invalid || t.shape == nil || len(offsets) != 2 || offsets[0] > offsets[1] {
		return fail(t.at, "expected a dtype, a shape and two ascending data_offsets")
	}
	t.begin, t.end = offsets[0], offsets[1]
	count, ok := product(t.shape)
	if !ok {
		return fail(t.at, "the shape %v has more than %d elements", t.shape, maxElements)
	}
	if count*t.dtype.Size() != t.end-t.begin {
		return fail(t.at, "the shape %v of %s takes %d bytes, but the data has %d", t.shape, t.dtype,
			count*t.dtype.Size(), t.end-t.begin)
	}
	return t, nil
}

// sizes returns a list of sizes. It is never nil.
func sizes(list *strict.Value) []int64 {
	numbers := make([]int64, len(list.Elements))
	for i, element := range list.Elements {
		numbers[i] = element.Integer
	}
	return numbers
}

// shard is the header of a file, with the tensors that the model takes from it.
type shard struct {
	*strict.Document
	tensors []tensor
}

func loadIndex(path, name string) (*Model, error) {
	doc, err := readDocument(path)
	if err != nil {
		return nil, err
	}
	files, names, err := parseIndex(doc)
	if err != nil {
		return nil, err
	}
	shards := []shard{}
	for _, file := range files {
		header, tensors, err := readHeader(filepath.Join(filepath.Dir(path), file))
		if err != nil {
			return nil, err
		}
		found := map[string]bool{}
		for _, t := range tensors {
			found[t.name] = true
		}
		wanted := map[string]bool{}
		for _, v := range names[file] {
			if !found[v.Name] {
				return nil, doc.Inputf(v.Value.At, "tensor %q is not in %s", v.Name, file).
					WithHint("download the index and its files again: they are not of one version")
			}
			wanted[v.Name] = true
		}
		// The index decides which file a tensor comes from.
		tensors = slices.DeleteFunc(tensors, func(t tensor) bool { return !wanted[t.name] })
		shards = append(shards, shard{header, tensors})
	}
	return fromTensors(shards, name, path)
}

// parseIndex returns the sorted files of weight_map, and the entries of each
// file.
func parseIndex(doc *strict.Document) (files []string, names map[string][]strict.Member, err error) {
	index, err := indexSchema.Read(doc)
	if err != nil {
		return nil, nil, err
	}
	weights := index.Find("weight_map")
	if weights == nil {
		return nil, nil, doc.Inputf(0, "weight_map is missing").WithHint("name a " + indexName)
	}
	names = map[string][]strict.Member{}
	for _, entry := range weights.Members {
		file := entry.Value.Text
		if file == "" || filepath.Base(file) != file || !strings.HasSuffix(file, ".safetensors") {
			return nil, nil, doc.Inputf(entry.Value.At,
				"tensor %q: expected the name of a safetensors file beside the index, found %s",
				entry.Name, entry.Value)
		}
		if _, ok := names[file]; !ok {
			files = append(files, file)
		}
		names[file] = append(names[file], entry)
	}
	slices.Sort(files)
	return files, names, nil
}

// buffers matches tensors of checkpoints that are not trained: positions and
// masks that old versions of transformers saved, DeepSeek-V3's bias that
// balances experts, and the scales of fp8 weights.
var buffers = lazyregexp.New(`(^|\.)(position_ids|masked_bias|inv_freq|e_score_correction_bias|\w+_scale_inv)$`)

// isBuffer reports whether a tensor is a buffer, not a parameter. It returns an
// error for quantized weights: they are packed, so their shapes do not describe
// the model.
func isBuffer(t tensor) (bool, error) {
	switch {
	case buffers.MatchString(t.name), isMask(t):
		return true, nil
	}
	switch t.dtype {
	case dtype.Bool, dtype.I64, dtype.U64:
		return true, nil
	case dtype.U8, dtype.I8, dtype.U16, dtype.I16, dtype.U32, dtype.I32:
		return false, fmt.Errorf("tensor %q holds %s: quantized weights do not say what is trained", t.name, t.dtype)
	}
	return false, nil
}

// isMask reports whether a tensor is the causal mask of GPT-2 and its
// relatives, "h.0.attn.bias".
func isMask(t tensor) bool {
	return strings.HasSuffix(t.name, ".bias") && len(t.shape) == 4 && t.shape[0] == 1 && t.shape[1] == 1 &&
		t.shape[2] == t.shape[3]
}

func fromTensors(shards []shard, name, source string) (*Model, error) {
	m := &Model{Name: name, Source: source}
	var total int64
	for _, s := range shards {
		for _, t := range s.tensors {
			buffer, err := isBuffer(t)
			if err != nil {
				return nil, s.Inputf(t.at, "%s", err.Error()).
					WithHint("name the config.json or the weights of the model before quantization")
			}
			if buffer {
				continue
			}
			p := Parameter{Name: t.name, Shape: t.shape, DType: t.dtype}
			m.Parameters = append(m.Parameters, p)
			if total += p.Elements(); total > maxElements || len(m.Parameters) > maxParameters {
				return nil, s.Inputf(t.at, "more than %d parameters or %d tensors", maxElements, maxParameters)
			}
		}
	}
	if len(m.Parameters) == 0 {
		return nil, fault.File(source).Inputf("the files hold no parameters")
	}
	slices.SortFunc(m.Parameters, func(a, b Parameter) int { return compareNames(a.Name, b.Name) })
	numberBlocks(m.Parameters)
	return m, nil
}

// compareNames orders layers.9 before layers.10.
func compareNames(a, b string) int {
	return slices.CompareFunc(strings.Split(a, "."), strings.Split(b, "."), func(a, b string) int {
		i, first := listIndex(a)
		j, second := listIndex(b)
		if first && second {
			return cmp.Or(cmp.Compare(i, j), cmp.Compare(a, b))
		}
		return cmp.Compare(a, b)
	})
}
