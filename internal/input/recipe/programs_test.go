package recipe_test

import _ "plimsoll/internal/input/recipe/programs" // the tests of package recipe recognize files
