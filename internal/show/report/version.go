package report

import (
	"cmp"
	"time"
)

// VersionSchema is the schema of the JSON document.
const VersionSchema = "plimsoll.version/1"

// Build is the document of a program: what it was built from, with what and for what.
type Build struct {
	Schema   string    `json:"schema"`
	Version  string    `json:"version"`
	Commit   string    `json:"commit,omitempty"`
	Modified bool      `json:"modified,omitempty"` // files differed from the commit
	Time     time.Time `json:"time,omitzero"`      // of the commit
	Go       string    `json:"go"`
	Platform string    `json:"platform"` // operating system and architecture
	Kernel   string    `json:"kernel"`   // that updates use here
}

// Page shows the document.
func (d *Build) Page() *Page {
	var facts Facts
	facts.add("plimsoll", "%s", d.Version)
	commit := cmp.Or(d.Commit, "not known: it was built without git")
	if d.Modified {
		commit += ", with changes"
	}
	facts.add("commit", "%s", commit)
	if !d.Time.IsZero() {
		facts.add("committed", "%s", d.Time.Format(time.DateTime+" MST"))
	}
	facts.add("go", "%s", d.Go)
	facts.add("platform", "%s", d.Platform)
	facts.add("kernel", "%s", d.Kernel)
	return &Page{Document: d, Title: "Version", Sections: []Section{{facts}}}
}
