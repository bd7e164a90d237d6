package foreign

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

var distcpKind = kind{
	"checkpoint of torch.distributed.checkpoint",
	"save the model and the optimizer with torch.distributed.checkpoint.save, as docs/checkpoints.md says",
}

// distcpPart is the part of all parameters of a checkpoint of torch.distributed.checkpoint.
const distcpPart = "dcp"

const metadataName = ".metadata"

// metadataClass admits what the metadata of torch.distributed.checkpoint is made of.
func metadataClass(c pickle.Class) bool {
	switch c.Module {
	case metadataModule:
		return true
	case filesystemModule:
		return c.Name == "_StorageInfo"
	case "torch.serialization":
		return c.Name == "_get_layout"
	case "pathlib":
		return strings.HasSuffix(c.Name, "Path")
	}
	return false
}

// OpenDistributed opens a checkpoint that torch.distributed.checkpoint.save has written, of a
// model and its optimizer by the names of parameters, as get_state_dict gives them. It reads
// every number of the two and verifies the archives' own checksums.
func OpenDistributed(ctx context.Context, path string, progress func(bytes int64)) (*checkpoint.Checkpoint, error) {
	d := &distcp{ctx: ctx, kind: distcpKind, path: path, progress: progress, names: map[string]bool{}}
	return d.assemble(metadataClass, distcpPart, d.readParameters)
}

// assemble makes a checkpoint of the metadata and of the parameters that are read then.
func (d *distcp) assemble(admitted func(pickle.Class) bool, part string, read func() error) (*checkpoint.Checkpoint,
	error) {
	defer d.close()
	file, info, err := files.Open(filepath.Join(d.path, metadataName))
	if err != nil {
		return nil, checkpoint.Cause(filepath.Join(d.path, metadataName), "this is no "+d.kind.name, errors.Unwrap(err))
	}
	text, err := files.ReadOpen(file, info, maxPickle)
	_ = file.Close()
	if err != nil {
		return nil, err
	}
	document, err := pickle.Read(text, admitted)
	if err == nil {
		err = d.readMetadata(document)
	}
	if err == nil {
		err = read()
	}
	var c *checkpoint.Checkpoint
	if err == nil {
		c, err = checkpoint.AssembleForeign(d.path, part, d.ranks)
	}
	return c, inputOf(d.kind, d.path, err)
}

// distcp is a checkpoint of torch.distributed.checkpoint.
type distcp struct {
	ctx      context.Context
	kind     kind
	path     string
	progress func(bytes int64)

	tensors map[string]*savedTensor    // by key
	keys    []string                   // of the tensors, sorted
	blobs   map[string]blob            // of the other objects, by key
	names   map[string]bool            // of the parameters
	inBlobs func(pickle.Class) bool    // admits objects in the files
	ranks   []*checkpoint.ForeignShard // the first chunks of all parameters, the second ones, and so on
	file    *os.File                   // the one that was read last
	name    string
}

// savedTensor is a tensor in chunks.
type savedTensor struct {
	shape  []int64
	chunks []savedChunk // in the order of their elements
	before []int64      // the shape before Megatron has flattened it, or nil
	isBF16 bool
}

// savedChunk is a part of a tensor.
type savedChunk struct {
	offsets, sizes []int64
	blob           blob
}

// blob is a part of a file that torch.save has written.
type blob struct {
	file        string
	shard.Range // of its bytes
}

func (d *distcp) close() {
	if d.file != nil {
		_ = d.file.Close()
	}
}

// attribute returns an attribute of an object, or nil.
func attribute(of any, name string) any {
	if o, ok := of.(*pickle.Object); ok {
		return pickle.Member(o.State, name)
	}
	return nil
}

// readMetadata reads which tensors there are, and where.
func (d *distcp) readMetadata(document any) error {
	where, err := storedBlobs(attribute(document, "storage_data"))
	if err != nil {
		return err
	}
	d.tensors, d.blobs = map[string]*savedTensor{}, map[string]blob{}
	for _, e := range pickle.Entries(attribute(document, "state_dict_metadata")) {
		key, ok := e.Key.(string)
		if !ok {
			return fmt.Errorf("its tensors have the key %s, expected a text", pickle.Shown(e.Key))
		}
		chunks := pickle.Items(attribute(e.Value, "chunks"))
		if chunks == nil {
			d.blobs[key] = where[blobKey(key, nil)]
			continue
		}
		t := &savedTensor{isBF16: typeOf(e.Value) == any(pickle.Class{Module: "torch", Name: "bfloat16"})}
		if t.shape, ok = pickle.Sizes(attribute(e.Value, "size")); !ok {
			return fmt.Errorf("%q has no size", key)
		}
		for _, item := range chunks {
			c, isOffsets := savedChunk{}, false
			c.offsets, isOffsets = pickle.Sizes(attribute(item, "offsets"))
			c.sizes, ok = pickle.Sizes(attribute(item, "sizes"))
			if c.blob = where[blobKey(key, c.offsets)]; !ok || !isOffsets || c.blob.file == "" {
				return fmt.Errorf("%q has a chunk without place, or without offsets and sizes", key)
			}
			t.chunks = append(t.chunks, c)
		}
		before := pickle.Member(pickle.Member(attribute(document, "mcore_data"), key),
			"nd_reformulated_orig_global_shape")
		if before != nil {
			if t.before, ok = pickle.Sizes(before); !ok {
				return fmt.Errorf("%q was flattened, and had the shape %s", key, pickle.Shown(before))
			}
		}
		slices.SortFunc(t.chunks, func(a, b savedChunk) int { return slices.Compare(a.offsets, b.offsets) })
		d.tensors[key] = t
	}
	d.keys = slices.Sorted(maps.Keys(d.tensors))
	return nil
}

// typeOf returns the dtype of a tensor. It is the first of its properties.
func typeOf(of any) any {
	properties := attribute(of, "properties")
	if o, ok := properties.(*pickle.Object); ok {
		if t, ok := o.State.(pickle.Tuple); ok && len(t) > 0 {
			return t[0]
		}
	}
	return attribute(properties, "dtype")
}

func blobKey(key string, offsets []int64) string { return fmt.Sprint(offsets, key) }

// storedBlobs returns where every chunk and object is.
func storedBlobs(data any) (map[string]blob, error) {
	where := map[string]blob{}
	for _, e := range pickle.Entries(data) {
		key, isKey := attribute(e.Key, "fqn").(string)
		offsets, _ := pickle.Sizes(attribute(e.Key, "offset"))
		b, isFile, isOffset, isLength := blob{}, false, false, false
		b.file, isFile = attribute(e.Value, "relative_path").(string)
		b.First, isOffset = attribute(e.Value, "offset").(int64)
		b.Count, isLength = attribute(e.Value, "length").(int64)
		switch {
		case !isKey || !isFile || !isOffset || !isLength || b.First < 0 || b.Count < 0:
			return nil, fmt.Errorf("it does not say where %q is", key)
		case filepath.Base(b.file) != b.file || !filepath.IsLocal(b.file):
			return nil, fmt.Errorf("%q is in %q, expected a file beside the metadata", key, b.file)
		case attribute(e.Value, "transform_descriptors") != nil:
			return nil, fmt.Errorf("%q is compressed or otherwise transformed, expected what torch.save writes", key)
		}
		where[blobKey(key, offsets)] = b
	}
	return where, nil
}

// stateKey is the key of an optimizer's state: its prefix, the parameter and the component.
var stateKey = lazyregexp.New(`^((?:.*?\.)?state\.)(.+)\.([a-z_0-9]+)$`)

// readParameters finds the state of every parameter, its master weights and its group.
func (d *distcp) readParameters() error {
	prefix, err := d.findState()
	if err != nil {
		return err
	}
	model, err := d.findModel(prefix)
	if err != nil {
		return err
	}
	groups, err := d.readGroups(strings.TrimSuffix(prefix, "state.") + "param_groups")
	if err != nil {
		return err
	}
	names := slices.Sorted(maps.Keys(d.names))
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(groups[a], groups[b]) })
	for _, name := range names {
		if err := d.addParameter(name, groups[name], model+name, prefix+name); err != nil {
			return fmt.Errorf("parameter %q: %w", name, err)
		}
	}
	return nil
}

// findState finds the parameters that have a state, and what all keys of states begin with.
func (d *distcp) findState() (prefix string, err error) {
	moments, options, hasMomentum := allMoments(), map[string]bool{}, false
	for _, key := range slices.Concat(d.keys, slices.Sorted(maps.Keys(d.blobs))) {
		m := stateKey.FindStringSubmatch(key)
		options[key[strings.LastIndexByte(key, '.')+1:]] = true
		switch {
		case m == nil:
			continue
		case m[3] != "step" && !moments[m[3]]:
			return "", fmt.Errorf("%q is no state of Adam, Lion, Adagrad or SGD", key)
		case prefix != "" && m[1] != prefix:
			return "", fmt.Errorf("it has the state of two optimizers, %q and %q, expected one", prefix, m[1])
		}
		prefix = m[1]
		d.names[m[2]] = true
		hasMomentum = hasMomentum || m[3] == sgdMomentum
	}
	if prefix == "" {
		return "", errors.New("it has no state of an optimizer, such as optim.state.NAME.exp_avg")
	}
	if hasMomentum {
		err = checkOptionsOfSGD(func(option string) bool { return options[option] })
	}
	return prefix, err
}

// momentKeys returns the algorithm whose moments a parameter has, and their keys. state is what the keys of the
// parameter's states begin with.
func (d *distcp) momentKeys(state string) (kernel.Algorithm, []string, error) {
	own := &pickle.Dict{}
	for component := range allMoments() {
		if d.tensors[state+"."+component] != nil {
			own.Entries = append(own.Entries, pickle.Entry{Key: component, Value: true})
		}
	}
	algorithm, moments, err := momentsIn(own)
	keys := make([]string, len(moments))
	for i, component := range moments {
		keys[i] = state + "." + component
	}
	return algorithm, keys, err
}

// findModel returns what the keys of all parameters begin with.
func (d *distcp) findModel(state string) (string, error) {
	some := slices.Min(slices.Collect(maps.Keys(d.names)))
	var found []string
	for _, key := range d.keys {
		prefix, ok := strings.CutSuffix(key, some)
		if !ok || strings.HasPrefix(key, state) || prefix != "" && !strings.HasSuffix(prefix, ".") {
			continue
		}
		lacks := func(name string) bool { return d.tensors[prefix+name] == nil }
		if !slices.ContainsFunc(slices.Collect(maps.Keys(d.names)), lacks) {
			found = append(found, prefix)
		}
	}
	if len(found) != 1 {
		return "", fmt.Errorf("the parameters that have a state are %d times in it, under %q: expected once, "+
			"as in model.%s", len(found), found, some)
	}
	return found[0], nil
}

// readGroups reads the parameter group of each parameter. A flattened state has none.
func (d *distcp) readGroups(prefix string) (map[string]int, error) {
	groups := map[string]int{}
	add := func(group int, names any) error {
		for _, item := range pickle.Items(names) {
			name, ok := item.(string)
			if _, twice := groups[name]; !ok || twice {
				return fmt.Errorf("parameter group %d has %s, which is no name or is listed twice", group,
					pickle.Shown(item))
			}
			groups[name] = group
		}
		return nil
	}
	if b, ok := d.blobs[prefix]; ok {
		return groups, d.withBlob(b, func(_ *archive, document any) error {
			for group, item := range pickle.Items(document) {
				if err := add(group, pickle.Member(item, "params")); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for group := 0; ; group++ {
		b, ok := d.blobs[fmt.Sprintf("%s.%d.params", prefix, group)]
		if !ok {
			return groups, nil
		}
		if err := d.withBlob(b, func(_ *archive, document any) error { return add(group, document) }); err != nil {
			return nil, err
		}
	}
}

// addParameter adds a parameter, each chunk to a shard of its own.
func (d *distcp) addParameter(name string, group int, master, state string) error {
	algorithm, keys, err := d.momentKeys(state)
	if err != nil {
		return err
	}
	step, err := d.readStep(algorithm, state+".step")
	if err != nil {
		return err
	}
	streams := make([]*savedTensor, 0, 3)
	for _, key := range append([]string{master}, keys...) {
		t := d.tensors[key]
		if t == nil {
			return fmt.Errorf("it has no tensor %q", key)
		}
		streams = append(streams, t)
	}
	whole := shard.Piece{Name: name, Shape: streams[0].shape, Group: group}
	if whole.Count, err = whole.Elements(); err != nil || whole.Count == 0 { // no shard has an empty piece
		return err
	}
	if err := whole.Validate(); err != nil {
		return err
	}
	for _, t := range streams[1:] {
		if !slices.Equal(t.shape, whole.Shape) {
			return errors.New("its weights and its moments have different shapes")
		}
	}
	if !d.areRows(streams) {
		at, err := d.gridsOf(streams)
		if err != nil {
			return err
		}
		return d.rank(0).Add(whole, algorithm, step, at)
	}
	for number, c := range streams[0].chunks {
		p := whole
		p.Range, _ = rowsOf(c, p.Shape) // is rows
		if p.Count == 0 {
			continue
		}
		var at []checkpoint.Numbers
		for _, t := range streams {
			l, err := d.locate(t.chunks[number])
			if err != nil {
				return err
			}
			at = append(at, l)
		}
		if err := d.rank(number).Add(p, algorithm, step, at); err != nil {
			return err
		}
	}
	return nil
}

// rank returns the shard of a rank.
func (d *distcp) rank(number int) *checkpoint.ForeignShard {
	for number >= len(d.ranks) {
		d.ranks = append(d.ranks, &checkpoint.ForeignShard{Had: map[string]int64{}})
	}
	return d.ranks[number]
}

// areRows tells whether the streams are cut into the same chunks of rows, as FSDP2 does.
func (d *distcp) areRows(streams []*savedTensor) bool {
	for _, t := range streams {
		if !slices.EqualFunc(t.chunks, streams[0].chunks, sameElements) {
			return false
		}
		for _, c := range t.chunks {
			if _, err := rowsOf(c, t.shape); err != nil {
				return false
			}
		}
	}
	return true
}

// gridsOf returns where the numbers of each stream are, however it is cut.
func (d *distcp) gridsOf(streams []*savedTensor) ([]checkpoint.Numbers, error) {
	var all []checkpoint.Numbers
	for _, t := range streams {
		g, err := d.gridOf(t)
		if err != nil {
			return nil, err
		}
		all = append(all, g)
	}
	return all, nil
}

func (d *distcp) gridOf(t *savedTensor) (grid, error) { return d.gridWith(t, (*archive).locate) }

// locator returns where the numbers of a tensor are in its archive.
type locator func(a *archive, tensor pickle.Tensor, shape []int64) (checkpoint.Location, error)

func (d *distcp) gridWith(t *savedTensor, locate locator) (grid, error) {
	var blocks []*block
	for _, c := range t.chunks {
		if slices.Contains(c.sizes, 0) {
			continue
		}
		at, err := d.locateWith(c, locate)
		if err != nil {
			return grid{}, err
		}
		blocks = append(blocks, &block{
			offsets: c.offsets, sizes: c.sizes, starts: []int64{0}, places: []checkpoint.Location{at},
		})
	}
	return newGrid(t.shape, blocks)
}

func sameElements(a, b savedChunk) bool {
	return slices.Equal(a.offsets, b.offsets) && slices.Equal(a.sizes, b.sizes)
}

// rowsOf returns the elements of a chunk. Chunks of rows are contiguous.
func rowsOf(c savedChunk, shape []int64) (shard.Range, error) {
	if len(c.offsets) != len(shape) || len(c.sizes) != len(shape) {
		return shard.Range{}, fmt.Errorf("a chunk at %v of %v in the shape %v", c.offsets, c.sizes, shape)
	}
	row := int64(1)
	for i := len(shape) - 1; i >= 1; i-- {
		if c.offsets[i] != 0 || c.sizes[i] != shape[i] {
			return shard.Range{}, fmt.Errorf("a chunk at %v of %v in the shape %v, expected rows", c.offsets, c.sizes,
				shape)
		}
		row *= shape[i]
	}
	if _, err := (shard.Piece{Shape: shape}).Elements(); err != nil || len(shape) == 0 {
		return shard.Range{Count: 1}, err
	}
	if c.sizes[0] > shape[0] || c.offsets[0] > shape[0]-c.sizes[0] {
		return shard.Range{}, fmt.Errorf("a chunk at %v of %v is outside of the shape %v", c.offsets, c.sizes, shape)
	}
	return shard.Range{First: c.offsets[0] * row, Count: c.sizes[0] * row}, nil
}

// readStep reads the step of a parameter, a tensor or a number.
func (d *distcp) readStep(algorithm kernel.Algorithm, key string) (step int64, err error) {
	b := d.blobs[key]
	if t := d.tensors[key]; t != nil && len(t.chunks) == 1 {
		b = t.chunks[0].blob
	}
	if b.file == "" {
		return (*archive)(nil).stepOf(algorithm, nil)
	}
	return step, d.withBlob(b, func(a *archive, document any) error {
		step, err = a.stepOf(algorithm, document)
		return err
	})
}

// locate returns where the numbers of a chunk begin.
func (d *distcp) locate(c savedChunk) (checkpoint.Location, error) {
	return d.locateWith(c, (*archive).locate)
}

func (d *distcp) locateWith(c savedChunk, locate locator) (at checkpoint.Location, err error) {
	return at, d.withBlob(c.blob, func(a *archive, document any) error {
		tensor, ok := document.(pickle.Tensor)
		if !ok {
			return fmt.Errorf("%s, expected a tensor", pickle.Shown(document))
		}
		at, err = locate(a, tensor, c.sizes)
		return err
	})
}

// withBlob opens a part of a file, calls use with its document, and verifies its
// checksums.
func (d *distcp) withBlob(b blob, use func(*archive, any) error) error {
	if b.file != d.name {
		d.close()
		d.file, d.name = nil, ""
		file, _, err := files.Open(filepath.Join(d.path, b.file))
		if err != nil {
			return checkpoint.Cause(filepath.Join(d.path, b.file), "the checkpoint is not complete", errors.Unwrap(err))
		}
		d.file, d.name = file, b.file
	}
	info, err := d.file.Stat()
	if err != nil {
		return err
	}
	if b.Count > info.Size() || b.First > info.Size()-b.Count {
		return checkpoint.Broken(d.file.Name(), "damaged: the file has %d bytes, and a tensor has %d from %d on",
			info.Size(),
			b.Count, b.First)
	}
	a := &archive{
		path: d.file.Name(), data: io.NewSectionReader(d.file, b.First, b.Count), base: b.First, size: b.Count,
		kind: d.kind,
	}
	document, err := a.document(d.inBlobs)
	if err != nil {
		return err
	}
	if err := use(a, document); err != nil {
		return err
	}
	return a.verify(d.ctx, d.progress)
}
