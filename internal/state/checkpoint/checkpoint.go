// Package checkpoint writes optimizer state to disk while training goes on. It loads
// the state into any number of ranks, any cut of the parameters and any format.
//
// A job has a shard for each rank and part. Every shard writes a safetensors file
// straight from its arenas, and then a manifest with a checksum of every chunk of
// every stream. The files lie in a hidden folder until [Commit] finds them complete,
// writes an index and renames the folder: a checkpoint exists completely or not at
// all. docs/checkpoints.md has the layout and the guarantees.
package checkpoint

import (
	"fmt"
	"math"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Shard is the state of one rank in one format: the concatenation of its pieces.
type Shard struct {
	Rank, World int
	// Replica is the number of this shard among Replicas ranks that hold the same
	// shard. It saves its share of the chunks. Replicas of 0 means 1.
	Replica, Replicas int
	Part              string // tells the shards of a rank apart
	Format            kernel.Format
	Pieces            []shard.Piece
	State             *engine.Shard
	// ownSteps are the steps that parameters have had, where they are not those of the state.
	ownSteps map[string]int64
	// Identity tells the files of a save from the files of another job or of an
	// earlier attempt. All shards of a save have the same identity, and no other
	// save has it. The empty string is an identity, too.
	Identity string
}

// owner returns whose file it is at a step.
func (s Shard) owner(step int64) owner { return owner{s.Rank, s.World, s.Part, s.Identity, step} }

// DoesNotFit says that a file system has too little room.
type DoesNotFit struct {
	Directory         string
	Needed, Available ledger.Bytes
	// Removed are leftovers of broken-off saves that this save has removed. Left
	// are leftovers that it may not remove.
	Removed, Left []Leftover
}

func (e *DoesNotFit) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s: the checkpoint takes %v, but the file system has only %v free",
		e.Directory, e.Needed, e.Available)
	for _, r := range e.Removed {
		fmt.Fprintf(&text, "; %s (%v), left by an interrupted save, was removed", r.Path, r.Bytes)
	}
	for _, l := range e.Left {
		fmt.Fprintf(&text, "; %s holds %v of an unfinished save", l.Path, l.Bytes)
	}
	text.WriteString("\n  hint: ")
	if len(e.Left) > 0 {
		text.WriteString("remove the unfinished save if no job is writing it; ")
	}
	text.WriteString("remove older checkpoints, or name a folder on another file system")
	return text.String()
}

// maxRanks keeps products of sizes within 64 bits.
const maxRanks = 1 << 20

var partName = lazyregexp.New(`^[a-zA-Z0-9._-]{1,64}$`)

// Names of files and folders.
const (
	indexName       = "plimsoll.index.json"
	SavingPrefix    = ".saving-"
	discardedPrefix = ".discarded-"
	replacedMark    = ".replaced"
	dataSuffix      = ".safetensors"
	manifestEnd     = ".json"
)

// maxStep keeps the names of folders within reason; no training gets there.
const maxStep = math.MaxInt64 / 2

var stepName = lazyregexp.New(`^step-(\d{8,19})$`)

func folderOf(step int64) string { return fmt.Sprintf("step-%08d", step) }

// manifestName is the name of a manifest: rank, world and part.
var manifestName = lazyregexp.New(`^rank-(\d{5,7})-of-(\d{5,7})-([a-zA-Z0-9._-]{1,64})\.json$`)

// fileName returns the name of the files of a shard, without suffix.
func fileName(rank, world int, part string) string {
	return fmt.Sprintf("rank-%05d-of-%05d-%s", rank, world, part)
}

// validateName refuses shards that files cannot be named after.
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

// Broken returns the error for a file that has changed since it was written.
func Broken(path, format string, arguments ...any) error {
	return fault.File(path).Inputf(format, arguments...).
		WithHint("use another checkpoint, or restore the file from a copy")
}

// Cause returns the error for a file that cannot be used.
func Cause(path, what string, err error) error {
	return &fault.Input{Where: fault.Position{File: path}, What: what, Err: err}
}
