package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Checkpoint is a complete checkpoint. None of its data has been read.
type Checkpoint struct {
	folder
	files      []*file // in the order of parts, and ranks in each
	parameters map[string]*parameter
	names      []string         // of the parameters, in the order in which shards have them
	quantized  string           // the class of moments that another program has quantized
	ownSteps   map[string]int64 // of parameters that have had fewer steps than the state
}

// Quantized returns the class of the moments if another program has quantized them, or "".
func (c *Checkpoint) Quantized() string { return c.quantized }

// folder is what checkpoints of shards and of states have in common.
type folder struct {
	path     string
	step     int64
	world    int
	identity string // of the save
	without  []int  // ranks that have no state, and no file
}

// Opened is a checkpoint of shards, or of states.
type Opened interface {
	Path() string
	Step() int64
	World() int
	// Bytes returns the number of bytes that Verify reports as progress.
	Bytes() int64
	// Verify reads every byte of every file and verifies the checksums. Several goroutines
	// call progress with the number of bytes read; it may be nil.
	Verify(ctx context.Context, progress func(bytes int64)) error

	common() *folder
}

// savedFile is a file of a checkpoint of either kind.
type savedFile interface {
	of() *manifestHead
	name() string // of the safetensors file, with its folder
	size() int64
	training() jsontext.Value // what the program has saved with it
}

// trainingOf returns the document that a rank has saved, or else the first document.
func trainingOf[F savedFile](files []F, rank int, part string) jsontext.Value {
	document := files[0].training()
	for _, f := range files {
		if f.of().Rank == rank && f.of().Part == part {
			document = f.training()
		}
	}
	document = slices.Clone(document)
	_ = document.Compact() // was valid when it was read
	return document
}

// file is the file of a shard.
type file struct {
	path     string // of the safetensors file
	manifest *manifest
	layout   *layout
	foreign  *ForeignShard // where the numbers lie, if another program has written them
}

// parameter is a parameter and its ranges in files.
type parameter struct {
	shard.Piece // all of it
	sources     []source
}

// source is where a file holds a range of elements, one after the other.
type source struct {
	shard.Range // of a parameter, or of the shard that is filled
	file        int
	from        int64 // element of the shard in the file
}

// Open opens a checkpoint of shards: that in a folder or, if the folder holds checkpoints,
// the newest of them. It reads the documents, and none of the data.
func Open(path string) (*Checkpoint, error) {
	opened, err := OpenAny(path)
	if err != nil {
		return nil, err
	}
	if c, ok := opened.(*Checkpoint); ok {
		return c, nil
	}
	return nil, fault.File(path).Inputf("the checkpoint holds states of an optimizer that updates them on its " +
		"device, expected the state of an optimizer of the service").
		WithHint("plimsoll.torch.StateOffload loads it, and any library for safetensors reads its tensors by name")
}

// OpenStates is [Open] for a checkpoint of states.
func OpenStates(path string) (*States, error) {
	opened, err := OpenAny(path)
	if err != nil {
		return nil, err
	}
	if c, ok := opened.(*States); ok {
		return c, nil
	}
	return nil, fault.File(path).Inputf("the checkpoint holds the state of an optimizer of the service, expected " +
		"states of an optimizer that updates them on its device").
		WithHint("load it with plimsoll.torch.AdamW and its like, or name a checkpoint of plimsoll.torch.StateOffload")
}

// OpenAny is [Open] for a checkpoint of either kind.
func OpenAny(path string) (Opened, error) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, &fault.Input{
			Where: fault.Position{File: path},
			What:  "expected a checkpoint, or a folder with checkpoints", Err: errors.Unwrap(err),
		}
	}
	if slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == indexName }) {
		return openFolder(path)
	}
	newest := int64(-1)
	for _, e := range entries {
		step := stepName.FindStringSubmatch(e.Name())
		if step == nil {
			continue
		}
		// A folder that cannot be read may be the newest checkpoint: openFolder
		// then returns the error.
		if _, err := os.Stat(filepath.Join(path, e.Name(), indexName)); !errors.Is(err, fs.ErrNotExist) &&
			!errors.Is(err, syscall.ENOTDIR) {
			if n, err := strconv.ParseInt(step[1], 10, 64); err == nil {
				newest = max(newest, n)
			}
		}
	}
	if newest < 0 {
		return nil, fault.File(path).Inputf("no complete checkpoint is here: expected %s, or a folder such as %s "+
			"with a checkpoint", indexName, folderOf(300))
	}
	return openFolder(filepath.Join(path, folderOf(newest)))
}

func Exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func openFolder(folder string) (Opened, error) {
	path := filepath.Join(folder, indexName)
	x := &index{}
	if _, err := readSealed(path, maxIndex, x); err != nil {
		return nil, err
	}
	if err := x.validate(); err != nil {
		return nil, Broken(path, "this is no index of a checkpoint: %v", err)
	}
	var files []savedFile
	for _, want := range x.Manifests {
		f, got, err := readManifest(filepath.Join(folder, want.File))
		if err != nil {
			return nil, err
		}
		if got.Bytes != want.Bytes || got.Sum[0] != want.Sum[0] {
			return nil, Broken(filepath.Join(folder, want.File),
				"this is not the file that %s names: %d bytes with the checksum %08x, expected %d with %08x",
				indexName, got.Bytes, got.Sum[0], want.Bytes, want.Sum[0])
		}
		files = append(files, f)
	}
	opened, err := assemble(folder, files, x.Without)
	if err != nil {
		return nil, err
	}
	c := opened.common()
	c.identity = x.Identity
	if c.step != x.Step {
		return nil, Broken(path, "the index is of step %d, but the files are of step %d", x.Step, c.step)
	}
	return opened, nil
}

// readManifest reads a manifest and checks the size of its file.
func readManifest(path string) (savedFile, stamp, error) {
	text, err := readBegun(path, sealBegin, maxManifest)
	if err != nil {
		return nil, stamp{}, err
	}
	found := stampOf(path, text)
	head := &manifestHead{}
	if err := unseal(text, head); err != nil {
		return nil, found, Broken(path, "damaged: %v", err)
	}
	read, what := readShard, "shard"
	if head.Schema == StatesSchema {
		read, what = readStates, "rank's states"
	}
	if want := fileName(head.Rank, head.World, head.Part) + manifestEnd; filepath.Base(path) != want {
		return nil, found, Broken(path, "the manifest is of another file, %s", want)
	}
	f, err := read(strings.TrimSuffix(path, manifestEnd)+dataSuffix, text)
	if err != nil {
		return nil, found, Broken(path, "this is no manifest of a %s: %v", what, err)
	}
	data, info, err := files.Open(f.name())
	if err != nil {
		return nil, found, Cause(f.name(), "the checkpoint is not complete", errors.Unwrap(err))
	}
	_ = data.Close()
	if info.Size() != f.size() {
		return nil, found, Broken(f.name(), "damaged: the file has %d bytes, expected %d", info.Size(), f.size())
	}
	return f, found, nil
}

// readShard reads the manifest of a shard.
func readShard(path string, text []byte) (savedFile, error) {
	m := &manifest{}
	if err := unseal(text, m); err != nil {
		return nil, err
	}
	l, err := m.layout()
	return &file{path: path, manifest: m, layout: l}, err
}

func (f *file) of() *manifestHead { return f.manifest.of() }

func (f *file) name() string { return f.path }

func (f *file) size() int64 { return f.manifest.Bytes }

func (f *file) training() jsontext.Value { return f.manifest.Training }

// assemble makes a checkpoint of the files of all ranks. Every rank must have a file,
// except ranks without any state.
func assemble(path string, files []savedFile, without []int) (Opened, error) {
	slices.SortFunc(files, func(a, b savedFile) int {
		return cmp.Or(cmp.Compare(a.of().Part, b.of().Part), cmp.Compare(a.of().Rank, b.of().Rank))
	})
	first := files[0].of()
	ranks := map[int]bool{}
	for _, f := range files {
		m := f.of()
		if m.Step != first.Step || m.World != first.World ||
			(m.Schema == StatesSchema) != (first.Schema == StatesSchema) {
			return nil, Broken(f.name(), "step %d of a job of %d ranks with %s, but %s has step %d of %d ranks with %s",
				m.Step, m.World, m.Schema, filepath.Base(files[0].name()), first.Step, first.World, first.Schema)
		}
		ranks[m.Rank] = true
	}
	own := folder{path: path, step: first.Step, world: first.World, without: without}
	if err := own.checkRanks(ranks); err != nil {
		return nil, err
	}
	if first.Schema == StatesSchema {
		return assembleStates(own, files)
	}
	return assembleShards(own, files)
}

// checkRanks reports an error unless every rank has a file, or no state.
func (c *folder) checkRanks(ranks map[int]bool) error {
	for _, rank := range c.without {
		switch {
		case rank < 0 || rank >= c.world:
			return Broken(c.path, "the index says that rank %d of %d has no state: expected a rank of the job", rank,
				c.world)
		case ranks[rank]:
			return Broken(c.path, "the index says that rank %d has no state, but the rank has saved some", rank)
		}
	}
	for _, rank := range c.without {
		ranks[rank] = true
	}
	if len(ranks) != c.world {
		return c.incomplete("the files of %s of %d are missing", missing(ranks, c.world), c.world)
	}
	return nil
}

// assembleShards makes a checkpoint of shards.
func assembleShards(own folder, files []savedFile) (*Checkpoint, error) {
	c := &Checkpoint{folder: own, parameters: map[string]*parameter{}, ownSteps: map[string]int64{}}
	for _, f := range files {
		c.files = append(c.files, f.(*file))
	}
	first := c.files[0].manifest
	for i, f := range c.files {
		if f.manifest.Algorithm != first.Algorithm {
			return nil, Broken(f.path, "it is the state of %s, but %s of %s", f.manifest.Algorithm,
				filepath.Base(c.files[0].path), first.Algorithm)
		}
		if err := c.add(i, f); err != nil {
			return nil, err
		}
		if err := c.addSteps(f); err != nil {
			return nil, err
		}
	}
	if err := c.checkShares(); err != nil {
		return nil, err
	}
	for _, name := range c.names {
		if err := c.checkWhole(c.parameters[name]); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// checkShares reports an error unless all replicas of a shard have saved. A parameter
// may be in a missing share alone: then no other file names it.
func (c *Checkpoint) checkShares() error {
	type shard struct {
		part     string
		replicas int
		pieces   uint32
	}
	saved := map[shard]map[int]bool{}
	for _, f := range c.files {
		s := f.manifest.Share
		if s == nil {
			continue
		}
		of := shard{f.manifest.Part, s.Replicas, s.Pieces[0]}
		if saved[of] == nil {
			saved[of] = map[int]bool{}
		}
		saved[of][s.Replica] = true
	}
	for of, replicas := range saved {
		if len(replicas) != of.replicas {
			return c.incomplete("part %s: %d ranks hold the same shard, but only the shares of %d of them are here",
				of.part, of.replicas, len(replicas))
		}
	}
	return nil
}

func (c *folder) incomplete(format string, arguments ...any) error {
	return fault.File(c.path).Inputf("the checkpoint is not complete: %s", fmt.Sprintf(format, arguments...))
}

// missing names the missing ranks, or the first of many.
func missing(there map[int]bool, world int) string {
	var list []string
	for rank := 0; rank < world; rank++ {
		if there[rank] {
			continue
		}
		if len(list) == 8 {
			list = append(list, "...")
			break
		}
		list = append(list, strconv.Itoa(rank))
	}
	if len(list) == 1 {
		return "rank " + list[0]
	}
	return "ranks " + strings.Join(list, ", ")
}

// add adds the ranges of the parameters of a file.
func (c *Checkpoint) add(number int, f *file) error {
	from := int64(0)
	for _, p := range f.layout.pieces {
		known := c.parameters[p.Name]
		if known == nil {
			known = &parameter{Piece: p}
			known.First = 0
			known.Count, _ = p.Elements() // was validated
			c.parameters[p.Name] = known
			c.names = append(c.names, p.Name)
		}
		if !slices.Equal(p.Shape, known.Shape) || p.Group != known.Group {
			return Broken(f.path, "parameter %q has the shape %v and is in group %d, but in %s it has %v and is in "+
				"group %d", p.Name, p.Shape, p.Group,
				filepath.Base(c.files[known.sources[0].file].path), known.Shape, known.Group)
		}
		known.sources = append(known.sources, source{p.Range, number, from})
		from += p.Count
	}
	return nil
}

// checkWhole reports an error unless every element of a parameter is in a file. It
// also reports an element that is twice in one rank: such files come from two jobs.
// (Two ranks may hold the same element.)
func (c *Checkpoint) checkWhole(p *parameter) error {
	slices.SortStableFunc(p.sources, func(a, b source) int { return cmp.Compare(a.First, b.First) })
	covered, ends := int64(0), map[int]source{}
	for _, s := range p.sources {
		rank := c.files[s.file].manifest.Rank
		if before, ok := ends[rank]; ok && before.End() > s.First {
			return fault.File(c.path).Inputf("parameter %q is twice in rank %d, in %s and in %s", p.Name, rank,
				filepath.Base(c.files[before.file].path), filepath.Base(c.files[s.file].path)).
				WithHint("remove the files that an earlier job has left here, and save again")
		}
		ends[rank] = s
		if s.First > covered {
			break
		}
		covered = max(covered, s.End())
	}
	if covered < p.Count {
		return c.incomplete("no file has the elements from %d on of parameter %q", covered, p.Name)
	}
	return nil
}

// Path returns the folder of the checkpoint.
func (c *folder) Path() string { return c.path }

// Step returns the step whose state it holds.
func (c *folder) Step() int64 { return c.step }

// World returns the number of ranks that have written it.
func (c *folder) World() int { return c.world }

func (c *folder) common() *folder { return c }

// Parts returns the names of the parts.
func (c *Checkpoint) Parts() []string {
	parts := map[string]bool{}
	for _, f := range c.files {
		parts[f.manifest.Part] = true
	}
	return slices.Sorted(maps.Keys(parts))
}

// Algorithm returns the algorithm of the optimizer.
func (c *Checkpoint) Algorithm() kernel.Algorithm { return c.files[0].layout.Format.Algorithm }

// File is a file of a checkpoint.
type File struct {
	Name       string
	Rank       int
	Part       string
	Format     kernel.Format
	Parameters int64 // elements
	Bytes      ledger.Bytes
}

// Files returns the safetensors files.
func (c *Checkpoint) Files() []File {
	var files []File
	for _, f := range c.files {
		files = append(files, File{
			filepath.Base(f.path), f.manifest.Rank, f.manifest.Part,
			f.layout.Format, f.layout.Elements, ledger.Bytes(f.manifest.Bytes),
		})
	}
	return files
}

// Parameter is a parameter of a checkpoint.
type Parameter struct {
	Name    string
	Shape   []int64
	Group   int
	State   kernel.State
	Moments kernel.MomentType
	Bytes   ledger.Bytes // of its streams in all files, without shared headers
	Ranks   int          // that hold a part of it
}

// Parameters returns the parameters, in the order in which shards have them.
func (c *Checkpoint) Parameters() []Parameter {
	var list []Parameter
	for _, name := range c.names {
		p := c.parameters[name]
		format := c.files[p.sources[0].file].layout.Format
		own := Parameter{Name: name, Shape: p.Shape, Group: p.Group, State: format.State, Moments: p.Moments}
		ranks := map[int]bool{}
		for _, s := range p.sources {
			f := c.files[s.file]
			ranks[f.manifest.Rank] = true
			chunk := f.layout.ChunkAt(s.from)
			for i := range f.layout.saved {
				stream := &f.layout.saved[i].Stream
				if _, _, ok := f.layout.In(stream, chunk); ok && stream.Role != kernel.HeaderRole {
					own.Bytes += ledger.Bytes(stream.BytesOf(s.Range))
				}
			}
		}
		own.Ranks = len(ranks)
		list = append(list, own)
	}
	return list
}
