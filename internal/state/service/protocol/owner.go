//go:build linux

package protocol

import (
	"fmt"
	"regexp"
	"slices"

	"github.com/go-json-experiment/json"
)

// Owner says whose session it is: the part of a rank in a job. It is in every document.
type Owner struct {
	Job        string `json:"job"`
	Rank       int    `json:"rank"`
	World      int    `json:"world"`
	LocalWorld int    `json:"local_world"`
	Part       string `json:"part"`
	Instance   int    `json:"instance,omitempty"`
	CPUs       []int  `json:"cpus,omitempty"`
}

// AnyDocument is a document from which a session is made: that of open, or that of hold.
type AnyDocument interface {
	Of() *Owner
	Validate() error
	// Difference returns the first difference to the document of an earlier session that matters, or nil.
	Difference(was AnyDocument) error
}

// Of returns the owner.
func (o *Owner) Of() *Owner { return o }

const (
	maximumRanks    = 1 << 20
	MaximumLocal    = 1 << 10 // ranks of a host
	MaximumCPUs     = 1 << 13
	maximumInstance = 1 << 31
)

// SafeName matches names that are safe in names of files and arenas.
var SafeName = regexp.MustCompile(`^[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,63}$`)

// MaximumDocument is the largest size of a document. Half a million parameters fit; reading it takes a GiB and some
// seconds at most.
const MaximumDocument = 64 << 20

// CheckDocumentLength refuses documents that are too long. Both open and restore call it.
func CheckDocumentLength(document uint64) error {
	if document == 0 || document > MaximumDocument {
		return fmt.Errorf("a document of %d bytes: expected 1 to %d", document, MaximumDocument)
	}
	return nil
}

// ParseDocument reads the document of open or hold, and checks it.
func ParseDocument(kind Kind, text []byte) (AnyDocument, error) {
	if kind == Hold {
		return parse[HoldDocument](kind, text)
	}
	return parse[Document](kind, text)
}

// ReadDocument is [ParseDocument] where the schema alone tells open from hold.
func ReadDocument(text []byte) (AnyDocument, error) {
	var of struct {
		Schema string `json:"schema"`
	}
	_ = json.Unmarshal(text, &of) // ParseDocument says what is wrong with the text
	if of.Schema == HoldSchema {
		return ParseDocument(Hold, text)
	}
	return ParseDocument(Open, text)
}

func parse[D any, P interface {
	*D
	AnyDocument
}](kind Kind, text []byte) (AnyDocument, error) {
	d := P(new(D))
	if err := json.Unmarshal(text, d, json.RejectUnknownMembers(true)); err != nil {
		return nil, Refused.Errorf("%v: the document cannot be read: %v", kind, err)
	}
	if err := d.Validate(); err != nil {
		return nil, Refused.Errorf("%v: %v", kind, err)
	}
	return d, nil
}

func (o *Owner) validate() error {
	switch {
	case !SafeName.MatchString(o.Job):
		return fmt.Errorf("job is %q: expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot at the beginning", o.Job)
	case !SafeName.MatchString(o.Part):
		return fmt.Errorf("part is %q: expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot at the beginning", o.Part)
	case o.Instance < 0 || o.Instance > maximumInstance:
		return fmt.Errorf("instance is %d: expected 0 to %d", o.Instance, maximumInstance)
	case o.World < 1 || o.World > maximumRanks:
		return fmt.Errorf("world is %d: expected 1 to %d", o.World, maximumRanks)
	case o.Rank < 0 || o.Rank >= o.World:
		return fmt.Errorf("rank is %d of %d: expected 0 to %d", o.Rank, o.World, o.World-1)
	case o.LocalWorld < 1 || o.LocalWorld > min(o.World, MaximumLocal):
		return fmt.Errorf("local_world is %d of %d ranks: expected 1 to %d", o.LocalWorld, o.World,
			min(o.World, MaximumLocal))
	case len(o.CPUs) > MaximumCPUs ||
		slices.ContainsFunc(o.CPUs, func(cpu int) bool { return cpu < 0 || cpu >= MaximumCPUs }):
		return fmt.Errorf("cpus: expected at most %d CPUs, each from 0 to %d", MaximumCPUs, MaximumCPUs-1)
	}
	return nil
}

// SessionPart names the part of a session. Optimizers of one program may each have a
// part of the same name; the instance tells their sessions apart.
func (o *Owner) SessionPart() string {
	if o.Instance == 0 {
		return o.Part
	}
	return fmt.Sprintf("%s@%d", o.Part, o.Instance)
}
