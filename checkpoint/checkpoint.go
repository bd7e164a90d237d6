// Package checkpoint writes optimizer state to disk while training goes on, and
// loads it into any number of ranks, any cut of the parameters and any format
// of the state.
//
// Every shard of a job, one for each rank and part, writes a safetensors file
// straight from its arenas and then a manifest, which has a checksum of every
// chunk of every stream. They lie in a hidden folder until [Commit] finds them
// complete, writes an index and renames the folder: a checkpoint is there as a
// whole or not at all. docs/checkpoints.md has the layout and the guarantees.
package checkpoint

import (
	"fmt"
	"math"
	"regexp"
	"strings"
	"unicode/utf8"

	"plimsoll/engine"
	"plimsoll/fault"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// Piece is a stretch of a parameter that a shard holds: elements First to First
// + Count of the flattened parameter.
type Piece struct {
	Name         string
	Shape        []int64 // of the whole parameter
	Group        int     // number of the parameter group
	First, Count int64
	Moments      kernel.MomentType
}

// Shard is what one rank holds in one format: the concatenation of its pieces.
type Shard struct {
	Rank, World int
	// Ranks whose shards are copies of each other are its replicas: this is
	// number Replica of Replicas, and saves its share of the chunks. None is one.
	Replica, Replicas int
	Part              string // tells the shards of a rank apart
	Format            kernel.Format
	Pieces            []Piece
	State             *engine.Shard
	// Identity tells the files of a save from those of any other, of another job
	// or of an earlier attempt: all shards of a save have the same one, which
	// nobody has had before. Empty is one, too.
	Identity string
}

// Sections are the stretches of a shard that differ in their parameter group or
// in how their moments are held: neighbours that are alike are one.
func Sections(pieces []Piece) []engine.Section {
	var sections []engine.Section
	for _, p := range pieces {
		if last := len(sections) - 1; last >= 0 && sections[last].Group == p.Group && sections[last].Moments == p.Moments {
			sections[last].Elements += p.Count
		} else {
			sections = append(sections, engine.Section{Elements: p.Count, Group: p.Group, Moments: p.Moments})
		}
	}
	return sections
}

// DoesNotFit says that a file system has too little room.
type DoesNotFit struct {
	Directory         string
	Needed, Available ledger.Bytes
	// Removed is what saves that were broken off had left and this one has removed,
	// and Left what it may not remove.
	Removed, Left []Leftover
}

func (e *DoesNotFit) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s: the checkpoint takes %v, and %v are free on the file system", e.Directory, e.Needed, e.Available)
	for _, r := range e.Removed {
		fmt.Fprintf(&text, "; %s (%v), which a save had left that was broken off, was removed", r.Path, r.Bytes)
	}
	for _, l := range e.Left {
		fmt.Fprintf(&text, "; %s holds %v of a save that is not finished", l.Path, l.Bytes)
	}
	text.WriteString("\n  hint: ")
	if len(e.Left) > 0 {
		text.WriteString("remove what is not finished if no job is saving there; ")
	}
	text.WriteString("remove older checkpoints, or name a folder on another file system")
	return text.String()
}

// Limits that keep sums and products of sizes within 64 bits.
const (
	maxElements = 1 << 48
	maxRanks    = 1 << 20
	maxGroups   = 1 << 20
)

// elements is the number of elements of the whole parameter.
func (p Piece) elements() (int64, error) {
	elements := int64(1)
	for _, n := range p.Shape {
		if n < 0 || n > maxElements || n > 0 && elements > maxElements/n {
			return 0, fmt.Errorf("parameter %q has the shape %v, expected one of at most %d elements", p.Name, p.Shape, int64(maxElements))
		}
		elements *= n
	}
	return elements, nil
}

// whole says that the piece is all of its parameter.
func (p Piece) whole() bool {
	elements, err := p.elements()
	return err == nil && p.First == 0 && p.Count == elements
}

// String names the piece as the tensors of its file are named.
func (p Piece) String() string {
	if p.whole() {
		return p.Name
	}
	return fmt.Sprintf("%s[%d:%d]", p.Name, p.First, p.First+p.Count)
}

func (p Piece) validate() error {
	elements, err := p.elements()
	switch {
	case err != nil:
		return err
	case p.Name == "":
		return fmt.Errorf("a parameter of the shape %v has no name", p.Shape)
	case !utf8.ValidString(p.Name):
		return fmt.Errorf("parameter %q has a name that is not UTF-8", p.Name)
	case p.First < 0 || p.Count < 1 || p.First > elements-p.Count:
		return fmt.Errorf("parameter %q: %d elements from %d on are no part of the %d that the shape %v has", p.Name, p.Count, p.First, elements, p.Shape)
	case p.Group < 0 || p.Group > maxGroups:
		return fmt.Errorf("parameter %q is in parameter group %d, expected 0 to %d", p.Name, p.Group, maxGroups)
	case p.Moments >= kernel.MomentType(len(kernel.MomentNames())):
		return fmt.Errorf("parameter %q: moments of type %d are not known", p.Name, uint8(p.Moments))
	}
	return nil
}

var partName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,64}$`)

// Names of files and folders.
const (
	indexName       = "plimsoll.index.json"
	savingPrefix    = ".saving-"
	discardedPrefix = ".discarded-"
	replacedMark    = ".replaced"
	dataSuffix      = ".safetensors"
	manifestEnd     = ".json"
)

// maxStep keeps the names of folders within reason; no training gets there.
const maxStep = math.MaxInt64 / 2

var stepName = regexp.MustCompile(`^step-(\d{8,19})$`)

func folderOf(step int64) string { return fmt.Sprintf("step-%08d", step) }

// manifestName is the name of a manifest: rank, world and part.
var manifestName = regexp.MustCompile(`^rank-(\d{5,7})-of-(\d{5,7})-([a-zA-Z0-9._-]{1,64})\.json$`)

// fileName is that of the files of a shard, without suffix.
func fileName(rank, world int, part string) string {
	return fmt.Sprintf("rank-%05d-of-%05d-%s", rank, world, part)
}

// validateName says whether files can be named after a shard.
func validateName(rank, world int, part string) error {
	switch {
	case world < 1 || world > maxRanks:
		return fmt.Errorf("a job of %d ranks, expected 1 to %d", world, maxRanks)
	case rank < 0 || rank >= world:
		return fmt.Errorf("rank %d of %d, expected 0 to %d", rank, world, world-1)
	case !partName.MatchString(part):
		return fmt.Errorf("part %q, expected 1 to 64 of a-z A-Z 0-9 . _ -", part)
	}
	return nil
}

// broken is a file that is not as it was written.
func broken(path, format string, arguments ...any) error {
	return &fault.Input{
		Where: fault.Position{File: path}, What: fmt.Sprintf(format, arguments...),
		Mend: "take another checkpoint, or the file from a copy",
	}
}

// cause is a file that cannot be used, and why.
func cause(path, what string, err error) error {
	return &fault.Input{Where: fault.Position{File: path}, What: what, Err: err}
}
