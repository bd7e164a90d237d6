// Package lazyregexp compiles regular expressions when they are first used, as Go's own internal/lazyregexp does. A
// program has hundreds of them, and most commands use a few: to compile all took a third of the time of a start.
package lazyregexp

import (
	"os"
	"regexp"
	"strings"
	"sync"
)

// Regexp is a regular expression that is compiled when it is first used.
type Regexp struct{ compiled func() *regexp.Regexp }

// New returns a regular expression. Tests compile it at once, so that they find one that is not well formed.
func New(expression string) *Regexp {
	r := &Regexp{sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })}
	if inTest {
		r.compiled()
	}
	return r
}

var inTest = strings.HasSuffix(os.Args[0], ".test")

// The methods are those of regexp.Regexp.

func (r *Regexp) MatchString(s string) bool            { return r.compiled().MatchString(s) }
func (r *Regexp) Match(b []byte) bool                  { return r.compiled().Match(b) }
func (r *Regexp) Find(b []byte) []byte                 { return r.compiled().Find(b) }
func (r *Regexp) FindString(s string) string           { return r.compiled().FindString(s) }
func (r *Regexp) FindStringIndex(s string) []int       { return r.compiled().FindStringIndex(s) }
func (r *Regexp) FindStringSubmatch(s string) []string { return r.compiled().FindStringSubmatch(s) }
func (r *Regexp) SubexpIndex(name string) int          { return r.compiled().SubexpIndex(name) }
func (r *Regexp) FindSubmatch(b []byte) [][]byte       { return r.compiled().FindSubmatch(b) }
func (r *Regexp) FindStringSubmatchIndex(s string) []int {
	return r.compiled().FindStringSubmatchIndex(s)
}
func (r *Regexp) FindAllString(s string, most int) []string {
	return r.compiled().FindAllString(s, most)
}
func (r *Regexp) FindAllSubmatch(b []byte, most int) [][][]byte {
	return r.compiled().FindAllSubmatch(b, most)
}
func (r *Regexp) FindAllStringSubmatch(s string, most int) [][]string {
	return r.compiled().FindAllStringSubmatch(s, most)
}
func (r *Regexp) ReplaceAllString(s, by string) string { return r.compiled().ReplaceAllString(s, by) }
func (r *Regexp) ReplaceAllStringFunc(s string, by func(string) string) string {
	return r.compiled().ReplaceAllStringFunc(s, by)
}
