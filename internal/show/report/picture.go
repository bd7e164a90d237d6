package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
)

// Picture is a drawing in the pages for browsers. Text and Markdown have the same numbers in words or in a table beside
// it, so it is empty there.
type Picture struct {
	Title         string
	Label         string // says the picture to those who do not see it
	Width, Height int
	Boxes         []pictureBox
	Texts         []pictureText
	Rules         []pictureRule
	Legend        []ganttKey
}

// pictureBox is a rectangle, with a title that a pointer shows.
type pictureBox struct {
	X, Y, Width, Height float64
	Class, Title        string
}

type pictureText struct {
	X, Y   float64
	Anchor string // start, middle or end
	Text   string
}

// pictureRule is a vertical line.
type pictureRule struct{ X, From, To float64 }

func (p *Picture) text(layout) string { return "" }

func (p *Picture) markdown() string { return "" }

// The sizes of a picture in pixels. The viewer scales it.
const (
	pictureWidth = 960
	pictureNames = 190 // for the names of rows, at the left
	pictureSizes = 86  // for their sums, at the right
	pictureRow   = 24
	pictureBar   = 16
)

// barRow is a row of bars: what a name holds.
type barRow struct {
	name  string
	parts []barPart
}

// barPart is a component's part of a row, in bytes, or an activity's part, in seconds.
type barPart struct {
	component ledger.Component
	activity  string // a class of the page
	title     string
	size      float64
}

func (r *barRow) sum() (sum float64) {
	for _, p := range r.parts {
		sum += p.size
	}
	return sum
}

// sizeWords says bytes, and signedWords says how many more or less they are.
func sizeWords(size float64) string { return ledger.Bytes(size).String() }

func signedWords(size float64) string { return ledger.Bytes(size).Signed() }

// put adds to the part of the same component.
func (r *barRow) put(part barPart) {
	for i := range r.parts {
		if r.parts[i].component == part.component {
			r.parts[i].size += part.size
			return
		}
	}
	r.parts = append(r.parts, part)
}

// stacked draws rows of bars on one scale, with a legend of their components. Rows that hold nothing are not drawn.
func stacked(title string, rows []barRow, say func(float64) string) Block {
	most := 0.
	for i := range rows {
		most = max(most, rows[i].sum())
	}
	if most == 0 {
		return Facts{}
	}
	p := &Picture{Title: title, Width: pictureWidth, Height: pictureRow*len(rows) + 8}
	classes, said := colorClasses(componentsOf(rows)), []string{}
	scale := (pictureWidth - pictureNames - pictureSizes) / most
	for i := range rows {
		y, x := float64(4+pictureRow*i), float64(pictureNames)
		p.Texts = append(p.Texts, pictureText{pictureNames - 8, y + pictureBar - 4, "end", rows[i].name})
		words := []string{}
		for _, part := range rows[i].parts {
			class := cmp.Or(part.activity, classes[part.component])
			p.Boxes = append(p.Boxes, pictureBox{x, y, part.size * scale, pictureBar, class,
				fmt.Sprintf("%s, %s: %s", rows[i].name, part.title, say(part.size))})
			if part.size*scale >= 0.5 { // what is not seen needs no key
				p.key(class, part.title)
			}
			words = append(words, part.title+" "+say(part.size))
			x += part.size * scale
		}
		p.Texts = append(p.Texts, pictureText{x + 6, y + pictureBar - 4, "start", say(rows[i].sum())})
		said = append(said, rows[i].name+": "+strings.Join(words, ", "))
	}
	p.Label = title + ". " + strings.Join(said, "; ")
	return p
}

// key adds a color to the legend. All that is grey has one line.
func (p *Picture) key(class, title string) {
	if class == otherColor {
		title = "other"
	}
	if !slices.Contains(p.Legend, ganttKey{class, title}) {
		p.Legend = append(p.Legend, ganttKey{class, title})
	}
}

// componentsOf returns the components of rows, those that hold most first.
func componentsOf(rows []barRow) (components []ledger.Component) {
	most := map[ledger.Component]float64{}
	for _, r := range rows {
		for _, p := range r.parts {
			if _, known := most[p.component]; !known {
				components = append(components, p.component)
			}
			most[p.component] = max(most[p.component], p.size)
		}
	}
	slices.SortStableFunc(components, func(a, b ledger.Component) int { return cmp.Compare(most[b], most[a]) })
	return components
}

// differing draws how far each row is from a plan: to the right what is more than planned, to the left what is less.
func differing(title string, rows []barRow) Block {
	most := 0.
	for i := range rows {
		most = max(most, rows[i].sum(), -rows[i].sum())
	}
	if most == 0 {
		return Facts{}
	}
	p := &Picture{Title: title, Width: pictureWidth, Height: pictureRow*len(rows) + 8}
	said := []string{}
	const from, to = pictureNames + pictureSizes, pictureWidth - pictureSizes
	zero, scale := (from+to)/2., (to-from)/2/most
	for i := range rows {
		y, size := float64(4+pictureRow*i), rows[i].sum()
		width := max(size, -size) * scale
		x, at, anchor, class := zero, zero+width+6, "start", "more"
		if size < 0 {
			x, at, anchor, class = zero-width, zero-width-6, "end", "less"
		}
		words := rows[i].name + ": " + signedWords(size)
		p.Boxes = append(p.Boxes, pictureBox{x, y, width, pictureBar, class, words})
		p.Texts = append(p.Texts, pictureText{pictureNames - 8, y + pictureBar - 4, "end", rows[i].name},
			pictureText{at, y + pictureBar - 4, anchor, signedWords(size)})
		said = append(said, words)
	}
	p.Rules = []pictureRule{{zero, 0, float64(p.Height)}}
	p.Label = title + ". " + strings.Join(said, "; ")
	return p
}
